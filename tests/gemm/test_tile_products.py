"""The functions of kernels/common/matrices.h: on NVIDIA GPUs they are others, which join fragments."""

from pathlib import Path

import pytest
import torch

import metalcore

HEADER = (Path(__file__).parents[2] / "kernels/common/matrices.h").read_text()
KERNEL = """
constant constexpr uint kDown = %(down)d, kDepth = %(depth)d, kFirst = %(first)d;
constant constexpr uint kTerms = %(terms)d, kAcross = %(across)d;
constant constexpr uint kLeft = 8 * kDepth + 8, kRight = 8 * (%(transposed)d ? kTerms : kAcross) + 8;
constant constexpr uint kRightRows = 8 * (%(transposed)d ? kAcross : kTerms);
kernel void product(device const %(A)s* a [[buffer(0)]], device const %(B)s* b [[buffer(1)]],
                    device float* c [[buffer(2)]], uint lane [[thread_index_in_simdgroup]]) {
  alignas(16) threadgroup %(A)s left[8 * kDown * kLeft];
  alignas(16) threadgroup %(B)s right[kRightRows * kRight];
  for (uint i = lane; i < 8 * kDown * kLeft; i += 32) left[i] = a[i];
  for (uint i = lane; i < kRightRows * kRight; i += 32) right[i] = b[i];
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  Fragments<%(A)s, kDown, kDepth> l;
  RightFragments<%(B)s, kTerms, kAcross> r;
  Fragments<float, kDown, kAcross> sums;
  clear(sums);
  load<kLeft>(l, left);
  %(load)s<kRight>(r, right);
  multiply(sums, l, kFirst, r);
  multiply(sums, l, kFirst, r);
  const Place place = place_of(lane);
  for (uint m = 0; m < kDown; ++m) {
    for (uint n = 0; n < kAcross; ++n) {
      device float* const to = c + (8 * m + place.row) * 8 * kAcross + 8 * n + place.column;
      to[0] = elements(sums.at[m][n]).x;
      to[1] = elements(sums.at[m][n]).y;
    }
  }
}
"""
TYPES = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat"}


each_layout = pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])


@each_layout
@pytest.mark.parametrize(
    "down, depth, first, terms, across",
    [
        (1, 1, 0, 1, 1),
        (1, 4, 0, 4, 4),
        (2, 2, 0, 2, 2),
        (2, 5, 2, 2, 4),
        (3, 3, 0, 3, 3),
        (4, 3, 1, 2, 1),
        (2, 4, 0, 4, 6),
    ],
)
@pytest.mark.parametrize("dtype", TYPES)
def test_twice_a_product_of_tiles(device, dtype, down, depth, first, terms, across, transposed):
    check(device, dtype, dtype, down, depth, first, terms, across, transposed)


@each_layout
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_left", [False, True], ids=["right", "left"])
def test_one_side_of_floats(device, narrow, is_left, terms, transposed):
    of_left, of_right = (torch.float32, narrow) if is_left else (narrow, torch.float32)
    check(device, of_left, of_right, 3, terms + 1, 1, terms, 2, transposed)


def check(device, of_left, of_right, down, depth, first, terms, across, transposed):
    torch.manual_seed(down)
    source = HEADER + KERNEL % {
        "A": TYPES[of_left],
        "B": TYPES[of_right],
        "transposed": transposed,
        "load": "load_transposed" if transposed else "load",
        "down": down,
        "depth": depth,
        "first": first,
        "terms": terms,
        "across": across,
    }
    # The last 8 elements of a tile's rows are no part of a matrix.
    a = torch.randn(8 * down, 8 * depth + 8).to(of_left)
    shape = (8 * across, 8 * terms + 8) if transposed else (8 * terms, 8 * across + 8)
    b = torch.randn(shape).to(of_right)
    c = torch.zeros(8 * down, 8 * across, device=device)
    metalcore.compile_shader(source).product(a.to(device), b.to(device), c, threads=32, group_size=32)
    left = a[:, 8 * first : 8 * (first + terms)].double()
    right = b[:, :-8].double().T if transposed else b[:, :-8].double()
    bound = 16 * terms * torch.finfo(torch.float32).eps * (left.abs() @ right.abs()) * 2
    assert ((c.cpu().double() - 2 * left @ right).abs() <= bound).all()
