// How the host calls a kernel that has tensors as arguments (see host/entry.h).
#pragma once

#include "host/entry.h"
#include "metal/tensor.h"

namespace msl {

template <uint32_t index, uint32_t shape>
struct tensor_buffer : buffer<index> {
  static METAL_FUNC const void* told(const Dispatch& d) { return d.buffers[shape]; }
};
template <uint32_t i, uint32_t shape>
struct binding<tensor_buffer<i, shape>> : binding<buffer<i>> {};

template <class T, class E, class... Tags>
struct pointee<metal::tensor<T, E, metal::tensor_handle, Tags...>> {
  using type = T;
};

template <int position, uint32_t index, uint32_t shape, class T, class E, class... Tags>
struct Slot<position, tensor_buffer<index, shape>, metal::tensor<T, E, metal::tensor_handle, Tags...>, void> {
  using Tensor = metal::tensor<T, E, metal::tensor_handle, Tags...>;
  using Descriptor = tensor_buffer<index, shape>;
  Tensor tensor;
  METAL_FUNC Slot(const Dispatch& d) : tensor(make_tensor<Tensor>(Descriptor::address(d), Descriptor::told(d))) {}
  METAL_FUNC Tensor at(const Dispatch&, const Thread&, uint32_t) const { return tensor; }
};

}  // namespace msl
