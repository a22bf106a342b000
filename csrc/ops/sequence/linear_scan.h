// What gated_delta_rule (delta_rule.cpp) records, and the kernels that it has for linear attention by chunks.
#pragma once

#include "../../../kernels/sequence/delta_rule.h"

#include "../common/common.h"

#include <cstdint>

namespace metalcore {

struct Call {
  Tensor q, k, v;
  MaybeTensor g, beta, state, ends, skip;
  DeltaRuleParams params;
  int64_t chunks;  // places for kept states
  bool empty;      // no position has anything to compute
};

// Whether every row of a head is whole vectors of 16 bytes.
bool is_wide(const Tensor& x);

// Whether the kernels of linear_scan.h take the call, if it is to be computed by chunks.
bool scans(const Call& call);

// What these kernels need in device memory. Tensors are allocated before the recording begins.
class LinearScan {
 public:
  LinearScan(const Call& call, bool for_derivative);

  void record(gpu::Recording& recording, const Tensor& out, const Tensor& final_state) const;
  struct Gradients {
    Tensor q, k, v, g, weights, state;
  };
  void record_backward(gpu::Recording& recording, const Tensor& grad, const MaybeTensor& grad_state,
                       const Gradients& found) const;

 private:
  void record_prepare(gpu::Recording& recording) const;
  struct Walk {
    const char* name;
    bool back;
    MaybeTensor others, state, out, final_state, dots, kept, states;
  };
  void record_walk(gpu::Recording& recording, const Tensor& values, const Walk& walk) const;

  const Call& call_;
  DeltaRuleParams params_;
  int64_t blocks_;  // of values
  Tensor scores_, factors_, added_, decays_;
  MaybeTensor reads_, carries_, overlaps_, states_, state_grads_, pairs_, parts_;  // for the derivative
};

// The gradient of skip, the sums over positions of v times the gradients of results.
class SkipGradient {
 public:
  SkipGradient(const Call& call, const Tensor& grad);

  void record(gpu::Recording& recording, const Tensor& grad, const Tensor& found) const;

 private:
  const Call& call_;
  DeltaRuleParams params_;
  Tensor parts_;
};

}  // namespace metalcore
