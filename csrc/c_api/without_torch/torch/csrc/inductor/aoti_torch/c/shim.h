// Takes the place of PyTorch's header of this path in libmetalcore: the functions that csrc/ops and csrc/gpu call, over
// torch::stable::Tensor of ../../../stable/tensor.h. csrc/c_api/tensor.cpp defines them.
#pragma once

#include <cstdint>

struct AtenTensorOpaque;
using AtenTensorHandle = AtenTensorOpaque*;  // the address of a torch::stable::Tensor
using AOTITorchError = int32_t;
constexpr AOTITorchError AOTI_TORCH_SUCCESS = 0;

struct AtenRecordFunctionOpaque;
using AtenRecordFunctionHandle = AtenRecordFunctionOpaque*;
using StableIValue = uint64_t;

// PyTorch's numbers of device types.
constexpr int32_t aoti_torch_device_type_cpu() { return 0; }
constexpr int32_t aoti_torch_device_type_cuda() { return 1; }
constexpr int32_t aoti_torch_device_type_mps() { return 13; }
constexpr int32_t aoti_torch_device_type_meta() { return 14; }
constexpr int32_t aoti_torch_layout_strided() { return 0; }

AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle tensor, void** data);
AOTITorchError aoti_torch_get_storage_offset(AtenTensorHandle tensor, int64_t* offset);
AOTITorchError aoti_torch_get_device_type(AtenTensorHandle tensor, int32_t* type);
AOTITorchError aoti_torch_get_layout(AtenTensorHandle tensor, int32_t* layout);
AOTITorchError aoti_torch_new_tensor_handle(AtenTensorHandle tensor, AtenTensorHandle* same);

// The memory is scratch of the running call's context. The handle serves until the thread's next call of this function.
// Throws std::bad_alloc.
AOTITorchError aoti_torch_empty_strided(int64_t dims, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                        int32_t device_type, int32_t device_index, AtenTensorHandle* made);

// There is no operator to call.
constexpr uint64_t TORCH_ABI_VERSION = 0;
inline AOTITorchError torch_call_dispatcher(const char*, const char*, StableIValue*, uint64_t) { return 1; }

// There is no profiler.
inline AOTITorchError aoti_record_function_start(const char*, const StableIValue*, const void*, int64_t,
                                                 AtenRecordFunctionHandle*) {
  return AOTI_TORCH_SUCCESS;
}
inline AOTITorchError aoti_record_function_end(AtenRecordFunctionHandle) { return AOTI_TORCH_SUCCESS; }
