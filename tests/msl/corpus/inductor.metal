// As torch.compile writes kernels for MPS: temporaries numbered, PyTorch's own headers, sizes as longs, a reduction by
// the threadgroup of a row.
#include <c10/metal/random.h>
#include <c10/metal/special_math.h>
#include <c10/metal/utils.h>
#include <c10/metal/reduction_utils.h>

// Row-wise log-softmax and the loss of one class: three passes over rows of ks0 columns.
[[max_total_threads_per_threadgroup(128)]]
kernel void log_softmax_nll(
    device float* out_ptr0,
    device float* out_ptr1,
    constant float* in_ptr0,
    constant long* in_ptr1,
    constant long& ks0,
    uint2 thread_pos [[thread_position_in_grid]],
    uint2 group_pos [[thread_position_in_threadgroup]]
) {
    auto xindex = thread_pos.x;
    auto r0_index = thread_pos.y;
    threadgroup float tmp_acc_0[32];
    threadgroup float tmp_acc_1[32];
    int x0 = xindex;
    int r0_1 = r0_index;
    auto tmp0 = in_ptr0[r0_1 + static_cast<int>(ks0)*x0];
    auto tmp1 = c10::metal::threadgroup_max(tmp_acc_0, tmp0, group_pos.y, static_cast<uint>(ks0));
    auto tmp2 = tmp0 - tmp1;
    auto tmp3 = metal::exp(tmp2);
    auto tmp4 = c10::metal::threadgroup_sum(tmp_acc_1, tmp3, group_pos.y, static_cast<uint>(ks0));
    auto tmp5 = metal::log(tmp4);
    auto tmp6 = tmp2 - tmp5;
    out_ptr0[r0_1 + static_cast<int>(ks0)*x0] = static_cast<float>(tmp6);
    auto tmp7 = in_ptr1[x0];
    if (r0_1 == tmp7) out_ptr1[x0] = static_cast<float>(-tmp6);
}

kernel void fused_gelu_dropout_where(
    device half* out_ptr0,
    constant half* in_ptr0,
    constant bool* in_ptr1,
    constant float& scale,
    uint xindex [[thread_position_in_grid]]
) {
    int x0 = xindex;
    auto tmp0 = static_cast<float>(in_ptr0[x0]);
    auto tmp1 = 0.5;
    auto tmp2 = tmp0 * tmp1;
    auto tmp3 = 0.7071067811865476;
    auto tmp4 = tmp0 * tmp3;
    auto tmp5 = c10::metal::erf(tmp4);
    auto tmp6 = 1.0;
    auto tmp7 = tmp5 + tmp6;
    auto tmp8 = tmp2 * tmp7;
    auto tmp9 = in_ptr1[x0];
    auto tmp10 = tmp9 ? tmp8 * scale : 0.0;
    auto tmp11 = c10::metal::max(tmp10, static_cast<float>(-0.125));
    out_ptr0[x0] = static_cast<half>(tmp11);
}

kernel void index_and_remainder(
    device long* out_ptr0,
    constant long* in_ptr0,
    constant long& ks0,
    uint xindex [[thread_position_in_grid]]
) {
    int x0 = xindex;
    auto tmp0 = in_ptr0[x0];
    auto tmp1 = ks0;
    auto tmp2 = tmp0 + tmp1;
    auto tmp3 = tmp0 < 0;
    auto tmp4 = tmp3 ? tmp2 : tmp0;
    auto tmp5 = c10::metal::floor_divide(tmp4, static_cast<long>(3));
    auto tmp6 = c10::metal::remainder(tmp0, static_cast<long>(5));
    out_ptr0[x0] = static_cast<long>(tmp5 * 100 + tmp6);
}
