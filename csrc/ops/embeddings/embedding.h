// Rows of a table by index, alone or in bags.
#pragma once

#include "../common/common.h"

#include <cstdint>
#include <tuple>

namespace metalcore {

// Operators: table[indices], with NaN for a row that the table does not have. Indices are int32 or int64.
Tensor embedding(const Tensor& weight, const Tensor& indices, int64_t padding, bool by_count, bool sparse);
// The results of bags, the sizes of bags, and for maxima the indices that have them. Indices and offsets are int64.
std::tuple<Tensor, Tensor, Tensor> embedding_bag(const Tensor& weight, const Tensor& indices, const Tensor& offsets,
                                                 int64_t mode, const MaybeTensor& factors, bool include_last_offset,
                                                 int64_t padding, bool by_count, bool sparse);
// The bag of each of `count` indices.
Tensor embedding_bag_samples(const Tensor& offsets, int64_t count, bool include_last_offset);

// Operators, for a gradient of embedding's or embedding_bag's results: that of a table with `rows` rows, summed in the
// order of the indices.
Tensor embedding_backward(const Tensor& grad, const Tensor& indices, int64_t rows, int64_t padding, bool by_count);
Tensor embedding_bag_backward(const Tensor& grad, const Tensor& indices, const Tensor& bags, const Tensor& sizes,
                              const Tensor& maxima, const MaybeTensor& factors, int64_t rows, int64_t padding,
                              bool by_count, int64_t mode);

// embedding in memory that the caller has. All are contiguous.
void embedding_into(const Tensor& out, const Tensor& table, const Tensor& indices);

// What an argument is checked for: a tensor of `count` int64 numbers.
void check_long(const char* op, const char* argument, const Tensor& tensor, const Tensor& reference, int64_t count);
bool are_integers(const Tensor& indices);                    // int32 or int64
void check_integers(const char* op, const Tensor& indices);  // the same
void check_factors(const char* op, const MaybeTensor& factors, const Tensor& reference, int64_t count);

// The tensor itself if it has the dtype, or a converted copy.
Tensor as_dtype(const Tensor& tensor, ScalarType dtype);

// Threads that lie next to each other have neighbouring elements of a row.
void dispatch_across(gpu::Recording& recording, int64_t across, int64_t down);

}  // namespace metalcore
