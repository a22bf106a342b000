// Rows of a table by index, alone or in bags.
#pragma once

#include "../common.h"

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

// embedding in memory that the caller has. All are contiguous.
void embedding_into(const Tensor& out, const Tensor& table, const Tensor& indices);

}  // namespace metalcore
