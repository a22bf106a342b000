"""Faults of programs with tensors: what checking mode, the compilation and the check say of them."""

import contextlib
import re

import pytest
import torch
from checking import HEAD as HEAD_OF_CHECK
from checking import assert_found, needs_clang
from test_tensors import HALF, HEAD, HELD, PARAMETERS, TILES

import metalcore
from metalcore.msl.check import check
from metalcore.msl.errors import MSLError

pytestmark = [pytest.mark.only_on("simulator", "cuda"), pytest.mark.usefixtures("compiles_for_cuda")]

FAULTS = """
kernel void fault(device float* x, device half* h, constant int& which, uint lane [[thread_index_in_simdgroup]]) {
  auto X = tensor(x, extents<int, 32, 16>());
  auto H = tensor(h, extents<int, 16, 16>());
  matmul2d<matmul2d_descriptor(16, 16, 16, false, false, false, mode::multiply_accumulate), execution_simdgroup> op;
  auto left = op.get_left_input_cooperative_tensor<half, half, float>();
  auto to = op.get_destination_cooperative_tensor<decltype(H), decltype(H), float>();
  if (which == 1) to.load(X.slice<16, 16>(17, 0));
  if (which == 2) to.load(X.slice(0, 17));
  if (which == 3) op.run(H, H, to);
  if (which == 4) to.set(0, 1), to.store(X);
  if (which == 5) {
    for (ushort i = 0; i < to.get_capacity(); ++i) to[i] = 0;
    op.run(left, H, to);
  }
  if (which == 6) {
    for (ushort i = 0; i < to.get_capacity(); ++i) to[i] = 0;
    if (lane < 16) op.run(H, H, to);
  }
  if (which == 7) {
    matmul2d<matmul2d_descriptor(16, 16), execution_simdgroups<4>> wide;
    auto spread = wide.get_destination_cooperative_tensor<decltype(H), decltype(H), float>();
    wide.run(H, H, spread);
  }
  if (which == 8) to[to.get_capacity() + 1] = 1;
  if (which == 9) {  // an element of one tensor as the same element of another
    left.load(H);
    for (ushort i = 0; i < to.get_capacity(); ++i) to[i] = left[i];
    to.store(X);
  }
  if (which == 10) {
    for (ushort i = 0; i < to.get_capacity(); ++i) to[i] = 0;
    auto rows = H.slice(0, lane % 2);
    op.run(rows, H, to);
  }
  if (which >= 11) {  // code that counts on elements of lanes that need not be the tensor's
    matmul2d<matmul2d_descriptor(16, 16), execution_simdgroup> product;
    product.run(H, H, to);
  }
  if (which == 11) {  // all elements of a lane, instead of those that are valid
    float sum = 0;
    for (ushort i = 0; i < to.get_capacity(); ++i) sum += to[i];
    x[lane] = sum;
  }
  if (which == 12) {  // as many elements as an M5 has
    for (ushort i = 0; i < 8; ++i) {
      const auto at = to.get_multidimensional_index(i);
      X[at] = to[i];
    }
  }
  if (which == 13) {  // a number of a row by the place of an M5
    auto least = op.get_row_reduction_destination_cooperative_tensor<decltype(H), decltype(H), float>();
    reduce_rows(to, least, reduction_operation::min, INFINITY);
    for (ushort i = 0; i < 8; ++i) to[to.get_capacity() - 8 + i] = least[i / 4];
    to.store(X);
  }
}

// Simdgroups that execute one line with descriptors of their own.
template <matmul2d_descriptor D, class Tensor, class To>
void multiply_by(thread Tensor& a, thread To& to) {
  matmul2d<D, execution_simdgroups<2>> op;
  op.run(a, a, to);
}
kernel void disagree(device float* x, device half* h, uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  auto X = tensor(x, extents<int, 32, 16>());
  auto H = tensor(h, extents<int, 16, 16>());
  if (simdgroup == 0)
    multiply_by<matmul2d_descriptor(16, 16)>(H, X);
  else
    multiply_by<matmul2d_descriptor(16, 16, 16, true)>(H, X);
}
"""


@pytest.fixture(scope="module")
def faulty(compiles_for_cuda):
    return metalcore.compile_shader(HEAD + FAULTS)


@pytest.mark.only_on("simulator")
@pytest.mark.parametrize(
    "which, kind",
    [
        (1, "out-of-bounds slice: .*reaches 33, where a dimension has 32 elements"),
        (2, "out-of-bounds slice: .*reaches 17, where a dimension has 16 elements"),
        (3, "unwritten element"),
        (4, "unwritten element"),
        (5, "unwritten element"),
        (6, r"divided scope: thread .* is at an operation on tensors, to which 16 of the 32 threads"),
        (7, "divided scope: .*32 of the 128 threads"),
        (8, "out-of-bounds index: .*index 17 of 16 elements"),
        (10, "divided scope: .*comes to another operation on tensors, or to the same one with other tensors"),
    ],
)
def test_checking_mode_finds(faulty, which, kind):
    x, h = torch.zeros(512, device="mps"), torch.zeros(256, dtype=HALF, device="mps")
    line = next(i for i, text in enumerate((HEAD + FAULTS).splitlines(), 1) if f"which == {which})" in text)
    with metalcore.simulator.checking(1), pytest.raises(metalcore.simulator.KernelError) as caught:
        faulty.fault(x, h, which, threads=32, group_size=32)
    message = str(caught.value)
    assert re.search(kind, message.replace("\n", " ")), message
    found = int(re.search(r"program_source:(\d+)", message)[1])
    assert line <= found <= line + 3, message


@pytest.mark.only_on("simulator")
def test_checking_mode_knows_shapes_of_arguments():
    """The host binds them beside the tensors, where the kernel declares nothing."""
    library = metalcore.compile_shader(
        HEAD + "kernel void extents(tensor<device half, dextents<int, 2>> x, device int* y) {"
        "  y[0] = x.get_extent(0); y[1] = x.get_extent(1); }"
    )
    x, y = torch.zeros(5, 7, dtype=HALF, device="mps"), torch.zeros(2, dtype=torch.int32, device="mps")
    with metalcore.simulator.checking(1):
        library.extents(x, y, threads=1)
        assert y.tolist() == [7, 5]


@pytest.mark.only_on("simulator")
def test_checking_mode_has_other_layouts(faulty):
    x, h = torch.zeros(16, 32, device="mps"), torch.arange(256.0).half().view(16, 16).to("mps")
    faulty.fault(x, h, 9, threads=32, group_size=32)
    assert torch.equal(x[:, :16], h.float()), "the layouts of an M5 are those outside of checking mode"
    with metalcore.simulator.checking(1):
        faulty.fault(x, h, 9, threads=32, group_size=32)
    assert not torch.equal(x[:, :16], h.float())


@pytest.mark.only_on("simulator")
@pytest.mark.parametrize("which", [11, 12, 13], ids=["mask", "capacity", "reduction"])
def test_checking_mode_has_elements_that_are_none(faulty, which):
    h, found = torch.randn(16, 16, dtype=HALF).to("mps"), []
    for mode in (contextlib.nullcontext(), metalcore.simulator.checking(1)):
        x = torch.zeros(16, 32, device="mps")
        with mode:
            faulty.fault(x, h, which, threads=32, group_size=32)
            found.append(x.cpu())
    assert found[0].isfinite().all()
    assert not torch.equal(*found)


@pytest.mark.only_on("simulator")
def test_checking_mode_finds_simdgroups_that_disagree(faulty):
    x, h = torch.zeros(16, 32, device="mps"), torch.zeros(16, 16, dtype=HALF, device="mps")

    def run():
        faulty.disagree(x, h, threads=64, group_size=64)
        x.cpu()  # waits

    with metalcore.simulator.checking(1), pytest.raises(metalcore.simulator.KernelError, match="divided scope"):
        run()


@pytest.mark.parametrize(
    "body, message",
    [
        (
            """auto A = tensor(x, extents<int, 16, 16>()); auto B = tensor(h, extents<int, 16, 16>());
            matmul2d<matmul2d_descriptor(16, 16), execution_simdgroup> op; op.run(A, A, B);""",
            "matmul2d does not multiply these types into that one",
        ),
        (
            """matmul2d<matmul2d_descriptor(16, 16), execution_simdgroup> op;
            auto a = op.get_left_input_cooperative_tensor<half, half, float>();""",
            "cooperative tensors as inputs need execution_simdgroup and a fixed k",
        ),
        (
            "matmul2d<matmul2d_descriptor(16, 0), execution_simdgroup> op; (void)op;",
            "the lengths of a matmul2d_descriptor",
        ),
        (
            "auto A = tensor(x, extents<int, 16, 16>()); x[0] = A.slice(0).get_extent(0);",
            "one index for each dimension",
        ),
    ],
)
def test_what_is_wrong_is_named(body, message):
    with pytest.raises(MSLError, match=message):
        metalcore.compile_shader(HEAD + f"kernel void k(device float* x, device half* h) {{ {body} }}")


@needs_clang
@pytest.mark.parametrize(
    "source", [TILES, HELD, HEAD + FAULTS, PARAMETERS], ids=["tiles", "held", "faults", "parameters"]
)
def test_the_check_takes_tensors(source):
    findings = check(source, std="metal4.0", strict=False)
    assert not findings, "\n".join(map(str, findings))


@needs_clang
def test_the_check_finds_what_is_wrong_with_tensors():
    assert_found(
        "#include <metal_tensor> //!\nkernel void k(tensor<device half, dextents<int, 2>> a [[buffer(0)]]) {}",
        "version",
    )
    body = """#include <metal_tensor>
        kernel void k(tensor<device half, dextents<int, 2>> a [[buffer(0)]], device float* x [[buffer(1)]]) {
          auto b = a.slice(0, 1);
          auto wrong = a.slice(0); //!
          tensor<threadgroup float, extents<int, 4>, tensor_inline> t(x, extents<int, 4>()); //!
        }"""
    findings = check(HEAD_OF_CHECK + body, filename="kernel.metal", std="metal4.0")
    lines = {i for i, line in enumerate((HEAD_OF_CHECK + body).splitlines(), 1) if line.endswith("//!")}
    assert {finding.line for finding in findings} == lines, "\n".join(map(str, findings))
