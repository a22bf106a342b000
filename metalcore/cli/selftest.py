"""python -m metalcore selftest: whether every op is right on this machine's GPU; a report to paste into an issue.

Results and gradients of every op's samples are compared with those of PyTorch's own ops in float64 on the CPU
(metalcore/_core/accuracy.py says by how much they may differ), and with those that an NVIDIA GPU recorded
(metalcore/golden)."""

from __future__ import annotations

import functools
import json
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F

import metalcore
from metalcore import _C, golden
from metalcore._core import accuracy, refused
from metalcore._core.registry import OPS, Op, Sample
from metalcore.msl.errors import CompilerNotFoundError

from . import devices, selftest_report

SUBNORMALS = "float16's subnormal numbers"


def add_parser(commands):
    parser = commands.add_parser(
        "selftest",
        help="check every op on this machine's GPU",
        description="Checks every op, forward and backward, against float64 on the CPU, and "
        "prints a report. Exits with 1 if anything is wrong.",
    )
    devices.add_option(parser)
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=run)


def run(arguments):
    stream = sys.stderr if arguments.json else sys.stdout  # programs get progress too, beside the result
    say = functools.partial(print, file=stream, flush=True)
    kind = arguments.device or devices.default()
    device = devices.use(kind)
    start = time.perf_counter()
    around = _machine(kind)
    for name, value in around.items():
        say(f"{name:<10} {value}")
    checks, planned = [], list(_checks(kind, device))
    say(_announcement(len(planned)))
    for number, (name, op, action) in enumerate(planned, 1):
        checks.append({"name": name, "op": op, **_outcome(action, kind)})
        say(f"[{number:{len(str(len(planned)))}}/{len(planned)}] {_line(checks[-1])}")
    ops = {}
    for name, op in OPS.items():
        own = [check for check in checks if check["op"] == name]
        ops[name] = {"error": selftest_report.worst(own), **selftest_report.times(op, device, kind == "simulator")}
        say(f"time of {name}: {ops[name]['microseconds']} µs, PyTorch's {ops[name]['microseconds of PyTorch']} µs")
    report = {
        "machine": around,
        "checks": checks,
        "summary": _summary(checks),
        "durations": _durations(checks, time.perf_counter() - start),
        "subnormal numbers of float16": next(check["note"] for check in checks if check["name"] == SUBNORMALS),
        "ops": ops,
    }
    report["text"] = selftest_report.text(report)
    say(f"\n----- to paste into a report, from here\n{report['text']}\n----- to here\n\n{report['summary']}")
    if arguments.json:
        print(json.dumps(report, indent=2))
    return 1 if any(check["status"] == "FAILED" for check in checks) else 0


def _summary(checks):
    failed = [check["name"] for check in checks if check["status"] == "FAILED"]
    skipped = sum(check["status"] == "skipped" for check in checks)
    summary = f"{len(checks) - len(failed) - skipped} of {len(checks)} checks passed"
    return (
        summary + f", {skipped} skipped" * bool(skipped) + f", {len(failed)} FAILED: {'; '.join(failed)}" * bool(failed)
    )


def _announcement(checks):
    if not hasattr(_C, "mps_compile"):
        return f"\n{checks} checks"
    seconds = selftest_report.estimate(_C.mps_kernels(), selftest_report.CALLS * selftest_report.ROUNDS)
    return (
        f"\n{checks} checks: about {sum(seconds.values()):.0f} s on the slowest Mac by an estimate, of which Metal "
        f"compiles for {seconds['compiling']:.0f} s if it has not done so before"
    )


def _durations(checks, seconds):
    """Returns how long everything took, and how long first compiles did."""
    compiled = [check for check in checks if "compiled in seconds" in check]
    if not compiled:
        return f"{seconds:.0f} s"
    kernels, spent = (sum(check[key] for check in compiled) for key in ("kernels", "compiled in seconds"))
    return f"{seconds:.0f} s, of which Metal made {kernels} kernels of {len(compiled)} families in {spent:.1f} s"


def _machine(kind):
    from .info import collect

    facts = collect()
    versions = facts["versions"]
    backend = {"mps": "metal", "cuda": "cuda", "simulator": "simulator"}[kind]
    return {
        "metalcore": versions["metalcore"],
        "torch": versions["torch"],
        "python": versions["python"],
        **devices.describe(kind),
        "device": kind,
        "backend": f"{backend}: {facts['backends'][backend]}",
    }


def _checks(kind, device):
    """Yields (name, name of the op or "", what to do) of every check; that returns {"note": …} with figures, or
    raises."""
    yield "tensors go to the kernels", "", lambda: _check_routing(device)
    if hasattr(_C, "mps_compile"):
        refused.forget()
        for family, names in _families().items():
            yield f"kernels of {family}", "", functools.partial(_check_family, names)
    yield "compile_shader", "", lambda: _check_shader(device)
    yield "compile_shader refuses a faulty program", "", _check_faulty_shader
    yield SUBNORMALS, "", lambda: _check_subnormals(device)
    for op in (*OPS.values(), _in_turns()):
        for sample in op.samples():
            for dtype in sorted(op.dtypes, key=str, reverse=True):
                yield (
                    f"{op.name}, {sample.name}, {str(dtype).removeprefix('torch.')}",
                    op.name,
                    functools.partial(_check_sample, op, sample, device, dtype),
                )
    for name in OPS:
        yield f"{name}, golden artifacts", name, functools.partial(_check_golden, name, device)
    if hasattr(_C, "mps_compile"):
        yield "no kernel is left to PyTorch's ops", "", _check_refused


def _in_turns():
    """Returns an op that runs metalcore's ops between PyTorch's own: they must see each other's results."""

    def chain(silu, softmax):
        def call(x):
            for _ in range(10):
                x = silu(x) + softmax(x / 2, -1)
            return x

        return call

    sample = Sample("64x1000", ((64, 1000),), terms=1000, roundings=40)
    ours, theirs = chain(metalcore.silu, metalcore.softmax), chain(F.silu, F.softmax)
    return Op("silu and softmax in turns", ours, lambda: (sample,), reference=theirs)


def _outcome(action, kind):
    try:
        return {"status": "ok", **action()}
    except Exception as error:  # whatever goes wrong is what the report is for
        if kind == "simulator" and isinstance(error, CompilerNotFoundError):  # compile_shader alone needs one
            return {"status": "skipped", "note": str(error)}
        return {"status": "FAILED", "note": f"{type(error).__name__}: {error}"}


def _line(check):
    return f"{check['status']:<8} {check['name']:<39}  {check['note']}".rstrip()


def _check_routing(device):
    from metalcore._core.routing import accelerated

    if not accelerated(torch.ones(2, device=device)):
        raise RuntimeError(f"this build of metalcore has no backend for {device} tensors: PyTorch's own ops take them")
    return {"note": ""}


def _families():
    """Returns the names of the built-in kernels, by family."""
    families = {}
    for name, family in _C.mps_kernels().items():
        families.setdefault(family, []).append(name)
    return families


def _check_family(names):
    """Compiles a family's kernels, so that one that Metal refuses is named even if no case below runs it."""
    start = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the report says it
            _C.mps_compile(*names)
    finally:
        refused.note()
    seconds = round(time.perf_counter() - start, 3)
    return {
        "note": f"{len(names)} kernels, {seconds:.1f} s",
        "kernels": len(names),
        "compiled in seconds": seconds,
    }


def _check_refused():
    """Raises where kernels were refused. A pipeline may also turn out too small for a call, which then is right, and
    PyTorch's."""
    refused.note()
    if refusals := _C.mps_refused():
        raise RuntimeError("\n".join(f"{family}: {reason}" for family, reason in refusals.items()))
    return {"note": ""}


def _check_sample(op, sample, device, dtype):
    shares = accuracy.shares(op, sample, device, dtype)
    wrong = [f"{part} {share:.3g}" for part, share in shares.items() if not share <= 1]
    if wrong:
        raise ArithmeticError(f"error of {', '.join(wrong)} times the bound")
    note = ", ".join(f"{part} {share:.2f}" for part, share in shares.items())
    return {"note": f"{note} of the bound", "share of the bound": shares}


@functools.cache
def _artifacts():
    """Returns the artifacts of the wheel, in a folder that lasts as long as the process."""
    folder = tempfile.TemporaryDirectory()
    golden.unpack(golden.REFERENCE, Path(folder.name))
    return folder


def _check_golden(name, device):
    folder = Path(_artifacts().name)
    comparisons = golden.compare(folder, device, lambda case: case.op.name == name and case.kind == "unit")
    comparisons = [comparison for comparison in comparisons if comparison.op == name]
    if not comparisons:
        return {"note": "none were recorded"}
    worst = max(comparisons, key=lambda comparison: (not comparison.right, comparison.error))
    if not worst.right:
        raise ArithmeticError(
            f"{worst.name}: {worst.problem or f'{worst.error:.3g} times the tolerance, {worst.where}'}"
        )
    return {"note": f"{len(comparisons)} agree, error {worst.error:.2f} of the tolerance"}


_SHADER = """
#include <metal_stdlib>
using namespace metal;

// Sums 256 consecutive elements, scaled: simdgroups, threadgroup memory, a barrier and bytes as an argument.
kernel void sum256(device const float* in [[buffer(0)]], device float* out [[buffer(1)]],
                   constant float& factor [[buffer(2)]],
                   uint group [[threadgroup_position_in_grid]], uint index [[thread_position_in_threadgroup]],
                   uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float partial[8];
  float sum = simd_sum(in[group * 256 + index]);
  if (lane == 0) partial[simdgroup] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (index == 0) {
    float total = 0.0f;
    for (uint i = 0; i < 8; ++i) total += partial[i];
    out[group] = factor * total;
  }
}
"""


# As in kernels/quant/subnormals.metal: the smallest float16 becomes 2 where it is no zero.
_SMALLEST = """
kernel void smallest(device uint* number [[buffer(0)]]) {
  number[0] = uint(float(as_type<half>(ushort(number[0]))) * 0x1p25f);
}
"""


def _check_subnormals(device):
    """Tells what is known at once of a GPU that decodes packed weights by such numbers, or else without them."""
    number = torch.ones(1, dtype=torch.int32, device=device)
    metalcore.compile_shader(_SMALLEST).smallest(number, threads=1)
    twice = number.item()
    if twice not in (0, 2):
        raise ArithmeticError(f"the smallest one is {twice / 2} of itself")
    if hasattr(_C, "mps_half_subnormals") and _C.mps_half_subnormals() != (twice == 2):
        raise RuntimeError(f"this GPU {'keeps' if twice else 'flushes'} them, and the backend has found the contrary")
    return {"note": "kept" if twice else "they become zero here; packed weights are decoded without them"}


def _check_shader(device):
    library = metalcore.compile_shader(_SHADER)
    x = torch.arange(1024, dtype=torch.float32, device=device)
    sums = torch.empty(4, device=device)
    library.sum256(x, sums, 2.0, threads=1024, group_size=256)
    expected = [65280.0, 196352.0, 327424.0, 458496.0]  # whole numbers below 2^24: exact in float32
    if sums.tolist() != expected:
        raise ArithmeticError(f"sums are {sums.tolist()}, not {expected}")
    return {"note": ""}


def _check_faulty_shader():
    try:
        library = metalcore.compile_shader("kernel void f(device float* x) { x[0] = no_such_name; }")
        _ = library.f  # where programs are compiled on first use
    except CompilerNotFoundError:
        raise
    except (RuntimeError, SyntaxError) as error:
        if "no_such_name" not in str(error):
            raise RuntimeError(f"the message does not say what is wrong: {error}") from error
        return {"note": ""}
    raise RuntimeError("it was compiled")
