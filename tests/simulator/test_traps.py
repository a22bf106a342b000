"""The CPU stops some kernels: the dispatch ends with KernelError, whichever way calls the kernel, and the process goes
on."""

import platform
import textwrap
from pathlib import Path

import pytest
import torch
from processes import python

import metalcore
from metalcore import _C
from metalcore.msl.errors import MSLError
from metalcore.simulator import KernelError, checking

PRELUDE = """#include <metal_stdlib>
using namespace metal;
"""

# Each kernel goes wrong for one value of x[0].
BODIES = {
    "division": "x[i] = 7 / x[i];",
    "modulo": "x[i] = 7 % x[i];",
    "write": "if (!x[i]) x[(1l << 44) + i] = 1;",
    "read": "if (!x[i]) x[i] = x[(1l << 44) + i];",
    "recursion": "if (!x[i]) x[i] = deep(x, 1000000);",
    "array": "if (!x[i]) x[i] = wide(x, i);",
    "trap": "if (!x[i]) __builtin_trap();",
    "abort": "if (!x[i]) __builtin_abort();",
    "exit": "if (!x[i]) exit(3);",
    "constant": "if (!x[i]) x[i] = x[i + 1] / 0;",
    "null": "if (!x[i]) *(device int*)nullptr = 1;",
}
FUNCTIONS = """
extern "C" void exit(int);
__attribute__((noinline))
int deep(device int* x, int n) { volatile int a[64]; a[n % 64] = x[n % 4]; return n ? deep(x, n - 1) + a[n % 64] : 0; }
__attribute__((noinline))
int wide(device int* x, uint i) { volatile int a[500000]; for (int k = 0; k < 500000; ++k) a[k] = *x; return a[i]; }
"""
KINDS = {
    "division": "integer division by zero",
    "modulo": "integer division by zero",
    "write": "memory access fault",
    "read": "memory access fault",
    "recursion": "stack overflow",
    "array": "stack overflow",
    "trap": "trap",
    "abort": "trap",
    "exit": "trap",
    "constant": "trap|integer division by zero",  # as compilers like
    "null": "memory access fault",
}
# Checking mode finds these before the CPU does.
CHECKED_KINDS = {
    "write": "out-of-bounds write",
    "read": "out-of-bounds read",
    "null": "out-of-bounds write",
    "constant": "integer division by zero",
}
if platform.machine() not in ("x86_64", "AMD64"):  # other CPUs give a result, as a GPU does
    for name in ("division", "modulo", "constant"):
        del KINDS[name], BODIES[name]


@pytest.fixture(scope="module")
def library(compiled_at_once):
    source = PRELUDE + FUNCTIONS
    for name, body in BODIES.items():
        source += f"kernel void plain_{name}(device int* x, uint i [[thread_position_in_grid]]) {{\n"
        source += f"{body}  // {name}\n}}\n"
        source += f"kernel void fiber_{name}(device int* x, uint i [[thread_position_in_grid]]) {{\n"
        source += f"threadgroup_barrier(mem_flags::mem_threadgroup);\n{body}  // {name}\n}}\n"
    compiled = metalcore.compile_shader(source)
    compiled.source_lines = source.split("\n")
    return compiled


@pytest.mark.parametrize("threading", ["plain", "fiber"])
@pytest.mark.parametrize("name", KINDS)
def test_ends_the_dispatch_only(device, library, name, threading, thread_count):
    kernel = getattr(library, f"{threading}_{name}")
    for _ in range(2):
        with pytest.raises(KernelError, match=f"({KINDS[name]}): .*METALCORE_CHECK=1") as caught:
            kernel(torch.zeros(20000, dtype=torch.int32, device=device), group_size=64)
        assert caught.value.kernel == f"{threading}_{name}" and caught.value.kind in KINDS[name].split("|")
        assert caught.value.line is None
    x = torch.full((20000,), 3, dtype=torch.int32, device=device)
    kernel(x, group_size=64)
    assert x.unique().tolist() == [{"division": 2, "modulo": 1}.get(name, 3)]


@pytest.mark.parametrize("threading", ["plain", "fiber"])
@pytest.mark.parametrize("name", KINDS)
def test_checking_finds_the_line(device, library, name, threading):
    kernel = getattr(library, f"{threading}_{name}")
    kind = CHECKED_KINDS.get(name, KINDS[name])
    place = {"recursion": "int deep(", "array": "int wide("}.get(name, f"// {name}")
    with checking():
        for _ in range(2):
            with pytest.raises(KernelError) as caught:
                kernel(torch.zeros(64, dtype=torch.int32, device=device), group_size=64)
            assert (caught.value.kernel, caught.value.kind) == (f"{threading}_{name}", kind)
            assert place in library.source_lines[caught.value.line - 1]
        x = torch.full((64,), 3, dtype=torch.int32, device=device)
        kernel(x, group_size=64)
        assert x.unique().tolist() == [{"division": 2, "modulo": 1}.get(name, 3)]


def run(program):
    return python("-c", textwrap.dedent(program), timeout=120)


BROKEN = """
import ctypes, faulthandler, metalcore, metalcore.simulator, signal, torch
{before}
kernel = metalcore.compile_shader('''kernel void k(device int* x, uint i [[thread_position_in_grid]]) {{
  x[(1l << 44) + i] = 1; }}''').k
x = torch.zeros(4, dtype=torch.int32, device="mps")
{between}
for _ in range(3):
    try:
        kernel(x)
    except metalcore.simulator.KernelError as error:
        assert error.kind == "memory access fault" and error.__class__ is metalcore.simulator.KernelError
        print("caught", flush=True)
assert signal.SIGSEGV not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
{after}
"""


def test_faults_of_other_code_go_where_they_went():
    """By default the signal ends the process; faulthandler, enabled before or after, says where."""
    crash = "ctypes.string_at(8)"
    done = run(BROKEN.format(before="", between="", after=crash))
    assert done.stdout == "caught\n" * 3 and done.returncode == -11, done.stderr
    enable = "faulthandler.enable()"
    for options in ({"before": enable, "between": ""}, {"before": "", "between": enable}):
        done = run(BROKEN.format(after=crash, **options))
        assert done.stdout == "caught\n" * 3 and done.returncode == -11, done.stderr
        assert "Segmentation fault" in done.stderr and "string_at" in done.stderr


def test_a_signal_from_outside_is_not_the_kernels():
    done = run(BROKEN.format(before="", between="", after="signal.raise_signal(signal.SIGFPE)"))
    assert done.stdout == "caught\n" * 3 and done.returncode == -8, done.stderr


def test_on_a_python_thread_that_ends():
    done = run(
        BROKEN.format(
            before="import threading",
            between="",
            after="""
def again():
    try:
        kernel(x)
    except metalcore.simulator.KernelError:
        print("caught", flush=True)
for _ in range(3):
    thread = threading.Thread(target=again)
    thread.start()
    thread.join()
""",
        )
    )
    assert done.stdout == "caught\n" * 6 and done.returncode == 0, done.stderr


def test_in_a_backward_pass(device):
    """A fault does not harm PyTorch's autograd engine, which runs on threads of its own."""
    kernel = metalcore.compile_shader("""kernel void k(device float* x, uint i [[thread_position_in_grid]]) {
        x[(1l << 44) + i] = 1; }""").k
    x = torch.zeros(4, device=device)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x * 2

        @staticmethod
        def backward(context, gradient):
            kernel(gradient)

    with pytest.raises(KernelError, match="memory access fault"):
        Function.apply(x.requires_grad_()).sum().backward()
    assert (x.detach() + 1).tolist() == [1] * 4


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("if (x[i] == 0) __builtin_unreachable();", "reaches code that must not be reached"),
        ("x[i] = last(x[i]);", "reaches the end of a function that returns a value"),
    ],
)
def test_checking_finds_what_has_no_meaning(device, body, what):
    source = (
        PRELUDE
        + f"""int last(int a) {{ if (a) return 1; }}
kernel void k(device int* x, uint i [[thread_position_in_grid]]) {{ {body} }}"""
    )
    with checking(), pytest.raises(KernelError, match=what) as caught:
        metalcore.compile_shader(source).k(torch.zeros(4, dtype=torch.int32, device=device))
    assert caught.value.kind == "trap" and caught.value.line in (3, 4)


def test_kernels_do_not_throw():
    with pytest.raises(MSLError, match="program_source:1"):
        _ = metalcore.compile_shader("kernel void k(device int* x) { if (*x) throw 1; }").k


ROOT = Path(__file__).resolve().parents[2]

# This kernel replaces a built-in one and writes past the end of its output.
BROKEN_KERNEL = """
#include <metal_stdlib>
kernel void silu_packed_float(device const float4* x [[buffer(0)]], device float4* y [[buffer(1)]],
                              uint i [[thread_position_in_grid]]) {
  y[i + 1] = x[i];
}
"""

CALLS = {
    "function": "metalcore.silu(x)",
    "operator": "torch.ops.metalcore.silu(x.detach())",
    "checkpoint": "torch.utils.checkpoint.checkpoint(metalcore.silu, x, use_reentrant=False)",
    "override": "with metalcore.enable_pytorch_overrides('silu'): torch.nn.functional.silu(x)",
}
PROGRAM = """
import sys, torch, metalcore, metalcore.simulator
from pathlib import Path
from metalcore.msl.runtime import host

folder = Path(sys.argv[1])
(folder / "checking").mkdir()
host.build(folder / "broken.metal", folder / "checking" / "broken.so", checking=True)
(folder / "index").write_text("broken silu_packed_float\\n")
metalcore._C.simulator_set_library_path(str(folder))
x = torch.ones(8, device="mps", requires_grad=True)
for call in sys.argv[2:]:
    with metalcore.simulator.checking():
        try:
            exec(call)
        except metalcore.simulator.KernelError as error:
            print(error.kind, error.line, error.thread.position_in_grid, error.file.endswith("broken.metal"), end=" ")
            print(str(error).split(",")[0])
    print((x * 2).sum().item())
"""


def test_faults_of_built_in_kernels(tmp_path):
    (tmp_path / "broken.metal").write_text(BROKEN_KERNEL)
    result = python("-c", PROGRAM, tmp_path, *CALLS.values(), cwd=ROOT, timeout=300)
    assert result.returncode == 0, result.stderr
    said = ["out-of-bounds write 5 (1, 0, 0) True kernel 'silu_packed_float' of broken.metal", "16.0"]
    lines = result.stdout.splitlines()
    assert {name: lines[2 * i : 2 * i + 2] for i, name in enumerate(CALLS)} == dict.fromkeys(CALLS, said)


def test_errors_name_a_built_in_kernel_and_its_source():
    folder = Path(_C.simulator_info()["library_path"]) / _C.simulator_info()["isa"]
    for path in sorted(folder.rglob("*.so"))[:3]:
        library = _C.simulator_load(str(path))
        name = _C.simulator_kernels(library)[0]["name"]
        source = path.relative_to(folder).with_suffix(".metal")
        with pytest.raises(
            ValueError, match=rf"^metalcore: kernel '{name}' of {source}: buffer '.*' at index .* is not bound"
        ):
            _C.simulator_dispatch(library, name, [], [], (1, 1, 1), (1, 1, 1))
