// How a kernel that has tensors as arguments is called on CUDA (see cuda/entry.h).
#pragma once

#include "cuda/entry.h"
#include "metal/tensor.h"

namespace msl {

template <uint32_t capacity>
struct TensorArgument {
  void* data;
  const unsigned char* told;

  template <class Parameter>
  METAL_FUNC Parameter as(const Grid&, const Place&) const {
    return make_tensor<std::remove_const_t<Parameter>>(data, told);
  }
};
template <uint32_t capacity>
METAL_FUNC TensorArgument<capacity> tensor_argument(Address data, InlineBytes<capacity> told) {
  return {data.address, told.address};
}

}  // namespace msl
