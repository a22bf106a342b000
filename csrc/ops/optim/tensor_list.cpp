#include <Python.h>

#include "tensor_list.h"

namespace metalcore {

using torch::stable::Tensor;

TensorList::TensorList(StableListHandle list) {
  size_t size = 0;
  TORCH_ERROR_CODE_CHECK(torch_list_size(list, &size));
  handles_.resize(size);
  for (size_t i = 0; i < size; ++i) {
    StableIValue item;
    TORCH_ERROR_CODE_CHECK(torch_list_get_item(list, i, &item));
    handles_[i] = torch::stable::detail::to<AtenTensorHandle>(item);
  }
  TORCH_ERROR_CODE_CHECK(torch_delete_list(list));
}

// PyTorch acquires and releases the GIL for each tensor whose last owner is the Python object. That costs little if the
// thread already has the GIL, and then it waits for other threads once and not at every tensor.
TensorList::~TensorList() {
  const bool needs_gil = !handles_.empty() && Py_IsInitialized();
  const PyGILState_STATE state = needs_gil ? PyGILState_Ensure() : PyGILState_UNLOCKED;
  for (AtenTensorHandle handle : handles_) aoti_torch_delete_tensor_object(handle);
  if (needs_gil) PyGILState_Release(state);
}

Tensor TensorList::tensor(size_t i) const {
  AtenTensorHandle shared = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(handles_[i], &shared));
  return Tensor(shared);
}

StableIValue on_stack(const TensorList& list) {
  StableListHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_new_list_reserve_size(list.size(), &made));
  for (size_t i = 0; i < list.size(); ++i)
    TORCH_ERROR_CODE_CHECK(torch_list_push_back(made, torch::stable::detail::from(list.tensor(i))));
  return torch::stable::detail::from(made);
}

}  // namespace metalcore
