// attention_backward(grad, grad_lse, q, k, v, …) returns the gradients of q, k and v.
#include "call.h"

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def(
      "attention_backward(Tensor grad, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
      "Tensor? mask, Tensor? sinks, Tensor? cu_seq_q, Tensor? cu_seq_k, Tensor? seed, int max_q, int max_k, int left, "
      "int right, bool lower_right, float scale, float softcap, float dropout) -> (Tensor, Tensor, Tensor, Tensor)");
}
