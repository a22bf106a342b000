"""Constants by their types that nested lambdas capture, and other values that they capture."""

import pytest
import torch

import metalcore

pytestmark = [pytest.mark.only_on("simulator", "cuda"), pytest.mark.usefixtures("compiles_for_cuda")]

SOURCE = """
#include <metal_stdlib>
using namespace metal;

template <typename T, T v>
struct constant_of {
  static constexpr constant T value = v;
  constexpr operator T() const thread { return v; }
};
template <typename F>
void with(int x, F f) {
  if (x > 0) f(constant_of<int, 2>{}, x); else f(constant_of<int, 0>{}, x);
}
template <int a, int b>
int joined() { return 10 * a + b; }

kernel void k(device int* y, uint i [[thread_position_in_grid]]) {
  int count = 0;
  with(int(i), [&](auto first, auto changed) {
    with(1, [&](auto second, int) {
      if constexpr (first && second) count += 100;
      with(1, [&](auto third, int) { count += joined<first.value, third>(); });
      changed += 1000;
    });
    count += changed;
  });
  y[i] = count;
}
"""


def test_constants_stay_constants_and_references_refer(device):
    y = torch.zeros(2, dtype=torch.int32, device=device)
    metalcore.compile_shader(SOURCE).k(y, threads=2)
    assert y.tolist() == [2 + 1000, 100 + 22 + 1001]
