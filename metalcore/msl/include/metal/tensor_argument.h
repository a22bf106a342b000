// A tensor that is an argument of a kernel. Its memory is bound like a buffer, and beside it a TensorShape as bytes.
#pragma once

#include "metal/tensor.h"

namespace msl {

// What the host tells of a tensor. The first dimension is the innermost one; strides count elements.
struct TensorShape {
  int32_t rank, element_bytes;
  int64_t unused;
  struct {
    int64_t extent, stride;
  } dimensions[1];  // as many as the tensor has
};

template <class Tensor>
METAL_FUNC Tensor make_tensor(void* data, const void* told) {
  using T = typename Tensor::element_type;
  using Extents = typename Tensor::extents_type;
  const TensorShape& shape = *static_cast<const TensorShape*>(told);
  if (shape.rank != int32_t(Extents::rank()) || shape.element_bytes != int32_t(sizeof(T))) fault();
  metal::array<typename Tensor::index_type, Extents::rank()> extents, strides;
  for (size_t i = 0; i < Extents::rank(); ++i) {
    extents.elements[i] = typename Tensor::index_type(shape.dimensions[i].extent);
    strides.elements[i] = typename Tensor::index_type(shape.dimensions[i].stride);
  }
  return Tensor(static_cast<typename Tensor::data_handle_type>(data), Extents(extents), strides);
}

}  // namespace msl

#include "target/tensor_entry.h"
