"""Every built-in kernel compiles for CUDA devices, and with the registers and the threadgroup memory of Apple's GPUs;
plans for these GPUs use no kernels that need not fit."""

import itertools
import re

import pytest
import torch
from rows import FAMILIES, tuned

from metalcore import _C
from metalcore._core.registry import OPS, Sample
from metalcore.msl.nvidia import cuda, nvrtc
from metalcore.msl.runtime import resources
from metalcore.recording import on_meta
from metalcore.tuning import workloads
from tools import register_gate
from tools.register_gate import NVIDIA, OVER

pytestmark = pytest.mark.only_on("simulator", "cuda")  # Linux, where NVRTC is
APPLE = [family for family in FAMILIES if family.startswith("apple")]  # those whose plans differ


@pytest.mark.parametrize("family", register_gate.families())
def test_every_kernel_fits(family):
    """It is the one place that compiles all kernels. `python -m tools.register_gate` prints what it finds. What the
    record says of the same text, compiler and options, which every change of kernels should renew, is believed."""
    if register_gate.recorded().get(family) == register_gate.digest(family):
        return
    found = register_gate.uses(family)
    assert [use.kernel for use in found] == list(cuda.builtin_programs()[family][1])
    assert not register_gate.faults(family, found)


def test_the_record_is_of_kernels_that_are_there():
    assert {*register_gate.recorded()} <= {*register_gate.families()}


def test_budgets():
    assert [register_gate.budget(threads) for threads in (1024, 1000, 896, 512, 500, 385, 384, 128, 0)] == [
        52, 52, 56, 104, 104, 116, 128, 128, 128,
    ]  # fmt: skip


# `alive` numbers are in registers at once, and `room` floats in threadgroup memory.
SEED = """#include <metal_stdlib>
using namespace metal;
[[kernel]] [[max_total_threads_per_threadgroup({threads})]] void seed(
    device const float* x [[buffer(0)]], device float* y [[buffer(1)]], uint i [[thread_position_in_grid]],
    uint at [[thread_index_in_threadgroup]]) {{
  threadgroup float room[{room}];
  float held[{alive}];
#pragma unroll
  for (uint k = 0; k < {alive}; ++k) held[k] = x[i + 1024 * k];
  room[at] = held[0];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float sum = room[at ^ 1];
#pragma unroll
  for (uint k = 0; k < {alive}; ++k) sum = sum * sum + held[{alive} - 1 - k];
  float total = 0.0f;
#pragma unroll
  for (uint k = 0; k < {alive}; ++k) total = total * sum + held[k];
  y[i] = total;
}}"""


@pytest.mark.parametrize(
    ("threads", "alive", "room", "fits"),
    [
        (1024, 30, 1024, True),
        (1024, 64, 1024, False),
        (512, 64, 1024, True),
        (512, 112, 1024, False),
        (256, 100, 1024, True),
        (256, 140, 1024, False),
        (256, 8, 8192, True),
        (256, 8, 8193, False),
    ],
)
def test_seeded_kernels(threads, alive, room, fits):
    (use,) = register_gate.uses_of(SEED.format(threads=threads, alive=alive, room=room))
    assert use.fits == fits and bool(use.fault) != fits
    assert use.threads == threads and use.registers <= use.budget and use.threadgroup_bytes == 4 * room


def test_the_digest_is_of_what_decides(monkeypatch):
    """Of the code, the headers, the bounds, the lists, the options and the compiler; not of comments."""
    seed = SEED.format(threads=256, alive=8, room=256)
    digest = register_gate.digest_of(seed)
    assert digest == register_gate.digest_of("// A comment.\n\n" + seed)
    others = [seed.replace("sum * sum", "sum"), seed.replace("256", "512"), "#include <metal_tensor>\n" + seed]
    digests = {digest, *map(register_gate.digest_of, others)}
    for module, name, value in (
        (register_gate, "NVIDIA", {"see.": "a test"}),
        (register_gate, "OVER", {"see.": "a test"}),
        (register_gate, "OCCUPANCY", ((104, 1024),)),
        (register_gate, "_code", lambda path: path.read_text() + " " * (path.name == "vec.h")),
        (resources, "FLAGS", ("-std=c++20",)),
        (nvrtc.find(), "version", (13, 9)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            digests.add(register_gate.digest_of(seed))
    assert len(digests) == 10


def test_a_listed_kernel_must_not_fit(monkeypatch):
    (use,) = register_gate.uses_of(SEED.format(threads=256, alive=8, room=256))
    monkeypatch.setitem(register_gate.OVER, "see.", "a test")
    assert "it fits" in use.fault


def test_a_kernel_of_nvidia_gpus_has_to_compile_alone(monkeypatch):
    monkeypatch.setitem(register_gate.NVIDIA, "see.", "a test")
    most = 48 * 1024 // 4
    (use,) = register_gate.uses_of(SEED.format(threads=1024, alive=64, room=most))
    assert (use.registers, use.local_bytes, use.threadgroup_bytes, use.fault) == (None, None, 4 * most, "")
    with pytest.raises(RuntimeError, match="shared data"):
        register_gate.uses_of(SEED.format(threads=1024, alive=64, room=most + 1))


def kernels():
    return {kernel for _, kernels in cuda.builtin_programs().values() for kernel in kernels}


@pytest.mark.parametrize("pattern", [*NVIDIA, *OVER])
def test_every_exception_is_a_kernel(pattern):
    assert any(re.fullmatch(pattern, kernel) for kernel in kernels())


def calls():
    """Calls of every op with kernels of the package, and those that tuning tables are measured with: around each
    boundary of a plan."""
    for op in OPS.values():
        if op.name == "flex_attention":  # its kernels are generated
            continue
        # The derivatives of other ops are made of ops.
        own = any(operator.endswith("_backward") for operator in op.operators)
        for sample in op.samples():
            for backward in [False, True] if own and sample.backward else [False]:
                yield workloads.Workload(op.name, sample, 0, 0, backward)
    for table in {entry["table"] for entry in _C.tunables("mps")}:
        yield from workloads.workloads(table, workloads.QUICK)


def attention_calls():
    """Calls for each kernel of attention: heads of each size, few and many queries, with a soft cap and without."""

    def call(queries, size, value_size, heads, softcap, backward=False):
        shapes = (1, heads, queries, size), (1, 1, 300, size), (1, 1, 300, value_size)
        sample = Sample("", shapes, {"enable_gqa": True, "softcap": softcap})
        return workloads.Workload("scaled_dot_product_attention", sample, 0, 0, backward)

    for softcap in (0.0, 2.0):
        for size, heads in itertools.product((64, 128, 256, 576), (1, 4, 12, 24)):
            yield call(1, size, min(size, 512), heads, softcap)
        for size in (64, 96, 128, 192, 256):
            yield call(70, size, size, 2, softcap, backward=True)


def dispatches(call, dtype):
    """What a call runs on a GPU."""
    op, sample = OPS[call.op], call.sample
    with on_meta("mps") as recorder:
        tensors = [torch.empty(shape, device="meta", dtype=dtype) for shape in sample.shapes]
        tensors = [tensor.requires_grad_(call.backward) for tensor in tensors]
        outputs = op.compute(sample, tensors)
        if wanted := [output for output in outputs if call.backward and output.requires_grad]:
            torch.autograd.backward(wanted, [torch.empty_like(output) for output in wanted])
    return recorder.recording.dispatches


def test_plans_for_apple_gpus_stay_within_what_kernels_promise():
    promised = {
        kernel: described["max_total_threads"] or register_gate.LEAST_THREADS
        for _, kernels in cuda.builtin_programs().values()
        for kernel, described in kernels.items()
    }
    planned = {}
    for family in APPLE:
        with tuned(family):
            for call in itertools.chain(calls(), attention_calls()):
                for dtype in OPS[call.op].dtypes - {torch.bfloat16}:  # which has the plans of float16
                    for dispatch in dispatches(call, dtype):
                        x, y, z = dispatch.threadgroup
                        planned[dispatch.kernel] = max(planned.get(dispatch.kernel, 0), x * y * z)
    assert len(planned) > 150
    assert not {kernel: threads for kernel, threads in planned.items() if threads > promised[kernel]}
    assert not [kernel for kernel in planned if register_gate.reason_of(kernel, NVIDIA)]
    of_attention = {
        kernel for kernel in kernels() if re.fullmatch(r"attention_(forward|decode|d).*_(float|half)", kernel)
    }
    assert not [kernel for kernel in of_attention - {*planned} if not register_gate.reason_of(kernel, NVIDIA)]
    lean = {"gemm_short_half", "quant_mv2_Q4_K", "rms_norm_backward_block2_512_aligned_float", "svd_lean_64"}
    assert lean <= {*planned}
