"""Checking mode: seeded faults in MSL, each with a clean twin.

In a source, a line that ends with `// @good` is in the clean kernel only, with `// @bad` in the faulty one only; a fault
must be reported at a line that ends with `@here`.
"""

import dataclasses
import os
import pickle
import re
import subprocess
import sys
import threading

import metalcore
import pytest
import torch
from metalcore.simulator import KernelError, checking


def select(source, faulty):
    """The source of one twin, and the lines where its fault may be reported."""
    drop = "@good" if faulty else "@bad"
    lines = ["" if drop in line else line for line in source.split("\n")]
    return "\n".join(lines), [number for number, line in enumerate(lines, 1) if "@here" in line]


@dataclasses.dataclass
class Case:
    name: str
    kind: str  # or several, where the order of the threads decides
    source: str
    arguments: tuple  # a number of elements of a new tensor, or a scalar
    threads: tuple
    group: tuple
    message: str = ""
    thread: object = None  # whether the reported thread is right, from its position in the threadgroup

    def tensors(self):
        return [torch.rand(a.count, device="mps").to(a.dtype) if isinstance(a, Buffer) else a for a in self.arguments]

    def run(self, faulty, **options):
        source, lines = select(HEADER + self.source, faulty)
        library = metalcore.compile_shader(source)
        arguments = self.tensors()
        with checking(**options):
            library.run(*arguments, threads=self.threads, group_size=self.group)
        return lines


@dataclasses.dataclass
class Buffer:
    count: int
    dtype: torch.dtype = torch.float32


HEADER = """#include <metal_stdlib>
using namespace metal;
"""

CASES = [
    Case(
        "barrier removed in a reduction",
        "race",
        """
kernel void run(device const float* x, device float* out, uint i [[thread_position_in_grid]],
                uint t [[thread_position_in_threadgroup]], uint g [[threadgroup_position_in_grid]]) {
  threadgroup float sums[128];
  sums[t] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint k = 64; k > 0; k /= 2) {
    if (t < k) {
      float other = sums[t + k];
      sums[t] += other;  // @here
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // @good
  }
  if (t == 0) out[g] = sums[0];
}""",
        (Buffer(512), Buffer(4)),
        (512,),
        (128,),
        "no threadgroup_barrier",
        lambda t: t[0] < 64,
    ),
    Case(
        "barrier with the wrong flags",
        "race",
        """
kernel void run(device const float* x, device float* out, uint t [[thread_position_in_threadgroup]]) {
  threadgroup float values[64];
  values[t] = x[t];
  threadgroup_barrier(mem_flags::mem_threadgroup);  // @good
  threadgroup_barrier(mem_flags::mem_device);  // @bad
  out[t] = values[63 - t];  // @here
}""",
        (Buffer(64), Buffer(64)),
        (64,),
        (64,),
        "no threadgroup_barrier",
    ),
    Case(
        "simdgroup barrier removed",
        "race or uninitialized read",  # as the reader comes second or first
        """
kernel void run(device const float* x, device float* out, uint t [[thread_position_in_threadgroup]],
                uint s [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float values[4][32];
  values[s][lane] = x[t];
  simdgroup_barrier(mem_flags::mem_threadgroup);  // @good
  out[t] = values[s][31 - lane];  // @here
}""",
        (Buffer(128), Buffer(128)),
        (128,),
        (128,),
    ),
    Case(
        "a SIMD operation is no barrier",
        "race or uninitialized read",
        """
kernel void run(device const float* x, device float* out, uint t [[thread_position_in_threadgroup]]) {
  threadgroup float values[32];
  values[t] = x[t];
  float sum = simd_sum(x[t]);
  simdgroup_barrier(mem_flags::mem_threadgroup);  // @good
  out[t] = sum + values[31 - t];  // @here
}""",
        (Buffer(32), Buffer(32)),
        (32,),
        (32,),
    ),
    Case(
        "a value overwritten that others still read",
        "race",
        """
kernel void run(device const float* x, device float* out, uint t [[thread_position_in_threadgroup]]) {
  threadgroup float shared;
  float sum = 0;
  for (uint i = 0; i < 4; ++i) {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // @good
    if (t == 0) shared = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum += shared;  // @here
  }
  out[t] = sum;
}""",
        (Buffer(4), Buffer(64)),
        (64,),
        (64,),
    ),
    Case(
        "read past the end",
        "out-of-bounds read",
        """
kernel void run(device const float* x, device float* out, uint i [[thread_position_in_grid]]) {
  float next = i < 255 ? x[i + 1] : 0;  // @good
  float next = x[i + 1];  // @bad @here
  out[i] = next - x[i];
}""",
        (Buffer(256), Buffer(256)),
        (256,),
        (64,),
        "reads 4 bytes out of bounds, at byte offset 1024 of buffer 'x' (index 0), which has 1024 bytes",
        lambda t: t == (63, 0, 0),
    ),
    Case(
        "read before the beginning",
        "out-of-bounds read",
        """
kernel void run(device const half* x, device half* out, uint i [[thread_position_in_grid]]) {
  out[i] = x[i];
  if (i > 0)  // @good
    out[i] -= x[int(i) - 1];  // @here
}""",
        (Buffer(256, torch.half), Buffer(256, torch.half)),
        (256,),
        (64,),
        "byte offset -2 of buffer 'x' (index 0)",
        lambda t: t == (0, 0, 0),
    ),
    Case(
        "write past the end",
        "out-of-bounds write",
        """
kernel void run(device float* out, constant uint& n, uint i [[thread_position_in_grid]]) {
  if (i < n)  // @good
  if (i <= n)  // @bad
    out[i] = float(i);  // @here
}""",
        (Buffer(100), 100),
        (128,),
        (32,),
        "byte offset 400 of buffer 'out' (index 0), which has 400 bytes",
        lambda t: t == (4, 0, 0),
    ),
    Case(
        "write before the beginning",
        "out-of-bounds write",
        """
kernel void run(device char* out, uint i [[thread_position_in_grid]]) {
  int shift = i == 0 ? 0 : 1;  // @good
  int shift = 1;  // @bad
  out[int(i) - shift] = i == 0;  // @here
}""",
        (Buffer(32, torch.int8),),
        (1,),
        (1,),
        "byte offset -1 of buffer 'out'",
    ),
    Case(
        "vector that hangs over the end",
        "out-of-bounds read",
        """
kernel void run(device const float4* x, device float* out, uint i [[thread_position_in_grid]]) {
  if (i < 2)  // @good
    out[i] = dot(x[i], float4(1));  // @here
}""",
        (Buffer(10), Buffer(3)),
        (3,),
        (3,),
        "byte offset 40 of buffer 'x' (index 0), which has 40 bytes",
    ),
    Case(
        "past the end of a threadgroup variable",
        "out-of-bounds write",
        """
kernel void run(device float* out, uint t [[thread_position_in_threadgroup]]) {
  threadgroup float first[32];
  threadgroup float second[32];
  second[t] = 0;
  if (t < 31)  // @good
  first[t + 1] = 1;  // @here
  if (t == 0) first[0] = 1;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[t] = first[t] + second[t];
}""",
        (Buffer(32),),
        (32,),
        (32,),
        "byte offset 128 of a threadgroup variable of 128 bytes",
        lambda t: t == (31, 0, 0),
    ),
    Case(
        "barrier in a divergent branch",
        "divergent barrier",
        """
kernel void run(device const float* x, device float* out, uint t [[thread_position_in_threadgroup]]) {
  threadgroup float values[64];
  values[t] = x[t];
  if (t < 20) {
    values[t] += 1;
    threadgroup_barrier(mem_flags::mem_threadgroup);  // @bad @here
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[t] = values[63 - t];
}""",
        (Buffer(64), Buffer(64)),
        (64,),
        (64,),
        thread=lambda t: t[0] < 20,
    ),
    Case(
        "barrier that some threads never reach",
        "divergent barrier",
        """
kernel void run(device const float* x, device float* out, constant uint& n, uint t [[thread_position_in_threadgroup]]) {
  threadgroup float values[64];
  if (t >= n) return;  // @bad
  values[t] = t < n ? x[t] : 0;
  threadgroup_barrier(mem_flags::mem_threadgroup);  // @here
  if (t < n) out[t] = values[n - 1 - t];
}""",
        (Buffer(40), Buffer(40), 40),
        (64,),
        (64,),
        "24 threads of its threadgroup, (40, 0, 0) for one, will not reach",
    ),
    Case(
        "33 KiB of threadgroup memory",
        "threadgroup memory",
        """
kernel void run(device float* out, uint t [[thread_position_in_threadgroup]]) {
  threadgroup float small[256];
  threadgroup float large[7936];  // @good
  threadgroup float large[8192];  // @bad @here
  small[t] = 1;
  large[t] = 2;
  out[t] = small[t] + large[t];
}""",
        (Buffer(32),),
        (32,),
        (32,),
        "33792 bytes; Metal allows 32768",
    ),
    Case(
        "threadgroup memory read before it is written",
        "uninitialized read",
        """
kernel void run(device float* out, uint t [[thread_position_in_threadgroup]]) {
  threadgroup float sums[32];
  if (t < 32)  // @good
  if (t < 31)  // @bad
    sums[t] = 1;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[t] = sums[t % 32];  // @here
}""",
        (Buffer(64),),
        (64,),
        (64,),
        "byte offset 124 of a threadgroup variable",
        lambda t: t[0] % 32 == 31,
    ),
    Case(
        "histogram that is not cleared",
        "uninitialized read",
        """
kernel void run(device const uint* x, device uint* out, uint t [[thread_position_in_threadgroup]]) {
  threadgroup atomic_uint bins[16];
  if (t < 16) atomic_store_explicit(&bins[t], 0, memory_order_relaxed);  // @good
  threadgroup_barrier(mem_flags::mem_threadgroup);
  atomic_fetch_add_explicit(&bins[x[t] % 16], 1, memory_order_relaxed);  // @here
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t < 16) out[t] = atomic_load_explicit(&bins[t], memory_order_relaxed);
}""",
        (Buffer(64, torch.int32), Buffer(16, torch.int32)),
        (64,),
        (64,),
    ),
    Case(
        "histogram that is cleared without a barrier",
        "race",
        """
kernel void run(device const uint* x, device uint* out, uint t [[thread_position_in_threadgroup]]) {
  threadgroup atomic_uint bins[64];
  atomic_store_explicit(&bins[t], 0, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  atomic_fetch_add_explicit(&bins[(t + x[t] + 1) % 64], 1, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // @good
  out[t] = *(threadgroup uint*)&bins[t];  // @here
}""",
        (Buffer(64, torch.int32), Buffer(64, torch.int32)),
        (64,),
        (64,),
    ),
    Case(
        "threadgroups write the same element",
        "race",
        """
kernel void run(device const float* x, device float* out, uint i [[thread_position_in_grid]],
                uint g [[threadgroup_position_in_grid]]) {
  if (i % 32 == 0)
    out[g] = x[i];  // @good
    out[g / 2] = x[i];  // @bad @here
}""",
        (Buffer(128), Buffer(4)),
        (128,),
        (32,),
        "no atomic operation in between",
    ),
    Case(
        "a threadgroup reads what another writes",
        "race",
        """
kernel void run(device float* x, device float* out, uint i [[thread_position_in_grid]], uint n [[threads_per_grid]]) {
  out[i] = x[i] + 1;
  if (i > 0) x[i] = out[i];  // @good
  if (i > 0) x[i] = out[i - 1];  // @bad @here
}""",
        (Buffer(128), Buffer(128)),
        (128,),
        (1,),
    ),
    Case(
        "simdgroups race through device memory",
        "race",
        """
kernel void run(device float* x, uint t [[thread_position_in_threadgroup]]) {
  float mine = x[t];
  threadgroup_barrier(mem_flags::mem_device);
  x[t] = mine * 2;
  threadgroup_barrier(mem_flags::mem_device);  // @good
  simdgroup_barrier(mem_flags::mem_device);  // @bad
  float other = x[(t + 32) % 64];  // @here
  threadgroup_barrier(mem_flags::mem_device);
  x[t] = other;
}""",
        (Buffer(64),),
        (64,),
        (64,),
    ),
    Case(
        "flag set without an atomic",
        "race",
        """
kernel void run(device float* data, device float* out, device atomic_uint* done, uint g [[threadgroup_position_in_grid]]) {
  data[g] = g;
  uint seen = atomic_fetch_add_explicit(done, 1, memory_order_relaxed);  // @good
  uint seen = atomic_load_explicit(done, memory_order_relaxed) + g;  // @bad
  if (seen == 3) out[0] = data[0] + data[1] + data[2];  // @here
}""",
        (Buffer(4), Buffer(1), Buffer(1, torch.int32)),
        (4,),
        (1,),
    ),
    Case(
        "write through a cast to const memory",
        "write to read-only memory",
        """
kernel void run(device const float* x, device float* out, uint i [[thread_position_in_grid]]) {
  out[i] = x[i];
  ((device float*)x)[i] = 0;  // @bad @here
}""",
        (Buffer(32), Buffer(32)),
        (32,),
        (32,),
        "buffer 'x' (index 0)",
    ),
    Case(
        "read past a constant argument",
        "out-of-bounds read",
        """
kernel void run(device float* out, constant float* weights, uint i [[thread_position_in_grid]]) {
  out[i] = weights[i % 4];  // @good
  out[i] = weights[i];  // @bad @here
}""",
        (Buffer(5), Buffer(4)),
        (5,),
        (5,),
        "buffer 'weights' (index 1)",
    ),
    Case(
        "device memory read before a barrier of threadgroup memory",
        "race",
        """
kernel void run(device float* x, uint t [[thread_position_in_threadgroup]]) {
  const float right = x[(t + 1) % 64];  // @here
  threadgroup_barrier(mem_flags::mem_threadgroup);  // @bad
  threadgroup_barrier(mem_flags::mem_device);  // @good
  x[t] = right;  // @here
}""",
        (Buffer(64),),
        (64,),
        (64,),
    ),
    Case(
        "a maximum over slots that nobody wrote",
        "uninitialized read",
        """
kernel void run(device const float* x, device float* out, uint t [[thread_position_in_threadgroup]],
                uint s [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float greatest[32], unused[32];
  if (s == 0) greatest[lane] = 0;  // @good
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float most = simd_max(x[t]);
  if (lane == 0) greatest[s] = most;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float any = unused[lane];
  out[t] = simd_max(greatest[lane]);  // @here
  if (t == 9999) out[t] = any;
}""",
        (Buffer(64), Buffer(64)),
        (64,),
        (64,),
        "of a threadgroup variable",
    ),
    Case(
        "a loop as long as a variable that nobody wrote says",
        "uninitialized read",
        """
kernel void run(device atomic_int* out, uint t [[thread_position_in_threadgroup]]) {
  threadgroup int count;
  if (t == 0) count = 3;  // @good
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = 0; i < count; ++i)  // @here
    atomic_fetch_add_explicit(out, 1, memory_order_relaxed);
}""",
        (Buffer(1, torch.int32),),
        (32,),
        (32,),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fault_is_found(case):
    lines = select(HEADER + case.source, True)[1]
    with pytest.raises(KernelError) as caught:
        case.run(faulty=True)
    error = caught.value
    assert error.kind in case.kind, error
    assert error.line in lines, error
    assert (error.kernel, error.file) == ("run", "program_source")
    assert case.message in str(error)
    assert f"kernel 'run', program_source:{error.line}: {error.kind}: thread" in str(error)
    local, group = error.thread.position_in_threadgroup, error.thread.threadgroup
    assert error.thread.position_in_grid[0] == local[0] + case.group[0] * group[0]
    if case.thread:
        assert case.thread(local), error
    # The process and the executor live on.
    case.run(faulty=False)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_clean_twin_passes(case, seed):
    case.run(faulty=False, seed=seed)


@pytest.mark.parametrize("seed", range(1, 6))
def test_faults_are_found_in_any_order_of_threads(seed):
    for case in CASES:
        with pytest.raises(KernelError) as caught:
            case.run(faulty=True, seed=seed)
        assert caught.value.kind in case.kind
        assert caught.value.line in select(HEADER + case.source, True)[1]


def test_without_checking_nothing_is_reported():
    case = next(case for case in CASES if case.name == "barrier with the wrong flags")
    source, _ = select(HEADER + case.source, True)
    metalcore.compile_shader(source).run(*case.tensors(), threads=64, group_size=64)


COPY = HEADER + """
kernel void copy(device const float* x, device float* y, constant int& shift, uint i [[thread_position_in_grid]]) {
  y[i] = x[int(i) + shift];
}"""


@pytest.mark.parametrize(("shift", "inside"), [(-1, False), (0, True), (1, False)])
def test_bounds_are_those_of_the_view(shift, inside):
    """The elements around a view belong to its storage, but not to the kernel."""
    storage = torch.arange(64.0, device="mps")
    x, y = storage[16:32], storage[32:48]
    copy = metalcore.compile_shader(COPY).copy
    before = storage.cpu()
    with checking():
        if inside:
            copy(x, y, shift, threads=16, group_size=16)
            before[32:48] = before[16:32]
        else:
            with pytest.raises(KernelError, match=r"buffer 'x' \(index 0\), which has 64 bytes"):
                copy(x, y, shift, threads=16, group_size=16)
    assert torch.equal(storage.cpu(), before)


def test_views_that_overlap_share_their_memory():
    """In place, and with one view inside the other."""
    x = torch.arange(32.0, device="mps")
    copy = metalcore.compile_shader(COPY).copy
    with checking():
        copy(x, x, 0, threads=32, group_size=32)
        copy(x, x[16:], 0, threads=16, group_size=16)
    assert torch.equal(x.cpu(), torch.arange(16.0).repeat(2))


def test_memory_outside_is_untouched_by_a_fault():
    x = torch.zeros(64, device="mps")
    source, _ = select(HEADER + CASES[7].source, True)
    assert CASES[7].name == "write past the end"
    library = metalcore.compile_shader(source)
    with checking(), pytest.raises(KernelError):
        library.run(x[:32], 32, threads=64, group_size=32)
    assert not x.cpu()[32:].any()


def test_checking_nests_and_is_left_by_exceptions():
    from metalcore.simulator.checking import enabled

    before = enabled()
    with pytest.raises(ZeroDivisionError), checking():
        with checking(seed=3):
            assert enabled()
        assert enabled()
        raise ZeroDivisionError
    assert enabled() == before


def test_blocks_of_several_threads_may_overlap():
    from metalcore.simulator.checking import enabled

    before = enabled()
    entered, leave = threading.Event(), threading.Event()

    def other():
        with checking(seed=1):
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with checking(seed=2):
        thread.start()
        entered.wait()
    assert enabled()
    leave.set()
    thread.join()
    assert enabled() == before


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_must_fit(seed):
    with pytest.raises(ValueError, match="32 bits"):
        checking(seed=seed)


def test_errors_survive_pickling():
    with pytest.raises(KernelError) as caught:
        CASES[0].run(faulty=True)
    error = pickle.loads(pickle.dumps(caught.value))
    assert str(error) == str(caught.value)
    assert (error.kind, error.line, error.thread) == (caught.value.kind, caught.value.line, caught.value.thread)


def test_message_names_both_lines():
    with pytest.raises(KernelError) as caught:
        CASES[0].run(faulty=True)
    assert re.search(r"program_source:\d+: race: thread .* reads in line 11", str(caught.value)), caught.value


@pytest.mark.parametrize(("setting", "expected"), [("1", True), ("0", False), ("", False)])
def test_the_environment_switches_checking_on(setting, expected):
    code = "from metalcore.simulator.checking import enabled; print(enabled())"
    environment = {**os.environ, "METALCORE_CHECK": setting}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.stdout == f"{expected}\n", result.stderr


def test_a_forked_child_checks_too():
    library = metalcore.compile_shader(COPY)
    x, y = torch.rand(16, device="mps"), torch.zeros(16, device="mps")
    with checking():
        library.copy(x, y, 0, threads=16, group_size=16)
        child = os.fork()
        if not child:
            try:
                library.copy(x, y, 1, threads=16, group_size=16)
            except KernelError as error:
                os._exit(error.line)
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5


def test_without_addr2line_the_line_is_missing(tmp_path):
    """The fault is still found; `PATH` leads to the compiler only."""
    code = f"""
import os, torch, metalcore, metalcore.simulator
library = metalcore.compile_shader('''{COPY}''')
x = torch.zeros(4, device="mps")
with metalcore.simulator.checking():
    library.copy(x, x, 0, threads=4, group_size=4)
    os.environ["PATH"] = {str(tmp_path)!r}
    try:
        library.copy(x, x, 1, threads=4, group_size=4)
    except metalcore.simulator.KernelError as error:
        print(error.line, error.kind, error.thread.position_in_grid)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "None out-of-bounds read (3, 0, 0)\n", result.stderr


@pytest.mark.parametrize("shift", [0, 1])
def test_lists_of_tensors_are_checked_as_buffers(shift):
    library = metalcore.compile_shader(HEADER + """
kernel void run(device float* out, device float* const device* tensors, constant int& shift, uint i [[thread_position_in_grid]]) {
  out[i] = tensors[0][i] + tensors[1][int(i) + shift];
}""")
    out, tensors = torch.zeros(4, device="mps"), [torch.full((4,), float(k), device="mps") for k in (1, 2)]
    with checking():
        if shift:
            with pytest.raises(KernelError, match=r"byte offset 16 of pointer 1 of buffer 'tensors' \(index 1\), which has 16 bytes"):
                library.run(out, tensors, shift, threads=4, group_size=4)
        else:
            library.run(out, tensors, shift, threads=4, group_size=4)
            assert out.tolist() == [3.0] * 4


def test_tables_of_pointers_of_built_in_kernels():
    """AdamW's kernel reaches its tensors through a table of addresses."""
    parameters = [torch.nn.Parameter(torch.rand(n, device="mps")) for n in (3, 100, 1)]
    expected = [p.detach().cpu().clone().requires_grad_() for p in parameters]
    for p, e in zip(parameters, expected):
        e.grad = torch.rand_like(e)
        p.grad = e.grad.to("mps")
    with checking():
        metalcore.optim.AdamW(parameters).step()
    torch.optim.AdamW(expected).step()
    for p, e in zip(parameters, expected):
        torch.testing.assert_close(p.detach().cpu(), e.detach(), rtol=1e-6, atol=0)
