"""The library for C with Metal contexts: each function against float64, buffers, errors, threads."""

import fcntl
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from build_runtime import WORK, build_for_c
from running import needs_runtime

sys.path.append(str(Path(__file__).resolve().parents[1] / "c_api"))
from c_cases import add, batch_decode, paged_append, softmax
from c_program import HERE, Calls, compiled
from saved_programs import Block, Mlp, Pair, Runs, read_like, replayed
from saved_programs import compiled as compiled_program
from test_errors import REFUSED, as_words
from test_functions import add_all, check

pytestmark = needs_runtime

F32 = torch.float32


@pytest.fixture(scope="session")
def library():
    """The library's path. Processes of pytest-xdist take turns, and the first one builds it."""
    WORK.mkdir(parents=True, exist_ok=True)
    with open(WORK / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return build_for_c()


def linked(source, output, library, *flags):
    return compiled(source, output, *flags, f"-L{library.parent}", f"-Wl,-rpath,{library.parent}")


@pytest.fixture(scope="session")
def program(library, tmp_path_factory):
    return linked(HERE / "calls.c", tmp_path_factory.mktemp("c_program") / "calls", library)


@pytest.fixture
def calls(tmp_path):
    return Calls(tmp_path)


def untouched(results):
    return all((result.view(torch.uint8) == 0x5A).all() for result in results)


@pytest.mark.parametrize(
    "options", [(), ("--device", "2"), ("--allocate", "1")], ids=["own", "context", "shared memory"]
)
def test_results(program, calls, options):
    cases = add_all(calls)
    check(cases, calls.run(program, *options))


def test_programs(library, device, tmp_path):
    """A program of a file, recorded on the simulated device, has that one's bits; inputs are copied or not."""
    program = linked(HERE / "programs.c", tmp_path / "programs", library)
    runs, expected = Runs(tmp_path), []
    for kind in (Mlp, Block, Pair):
        made, arguments = compiled_program(kind, device)
        made.save(tmp_path / f"{kind.__name__}.mcore", recordings=True)
        results = replayed(made, arguments)
        expected.append((results, runs.add(tmp_path / f"{kind.__name__}.mcore", arguments, results)))
    for trusted in ("0", "1"):
        reports = runs.run(program, "--device", "2", "--trusted", trusted, "--repeat", "3")
        for (results, paths), (status, _, error) in zip(expected, reports, strict=True):
            assert status == "METALCORE_OK", error
            for path, like in zip(paths, results, strict=True):
                assert torch.equal(read_like(path, like), like)


def test_checking_mode(program, calls):
    """Kernels stay within the buffers that they are given."""
    cases = add_all(calls)
    check(cases, calls.run(program, METALCORE_CHECK="1"))


def test_nothing_is_made_again(program, calls):
    """Neither buffers nor pipelines. The first call makes some."""
    cases = add_all(calls)
    reports = calls.run(program, "--repeat", "4")
    assert not {function: count for (function, *_), (_, count, *_) in zip(cases, reports, strict=True) if count}
    first = Calls(calls.folder)
    first.add(*cases[0][:1], *cases[0][1])
    ((_, count, *_),) = first.run(program)
    assert count > 0


def test_threads(program, calls):
    """Threads with contexts of their own get the same bits."""
    cases = add_all(calls)
    reports = calls.run(program)
    calls.run(program, "--device", "2", "--threads", "4", OMP_NUM_THREADS="1")
    for index, (function, *_) in enumerate(cases):
        for thread in range(4):
            for alone, together in zip(reports[index][3], calls.results(index, f".{thread}"), strict=True):
                assert torch.equal(alone.view(torch.uint8), together.view(torch.uint8)), (function, thread)


def test_long_work(program, calls):
    """A command buffer takes 200 ms of work. The GPU is slower than any, and calls need several."""
    cases = add_all(calls)
    check(cases, calls.run(program, METAL_RUNTIME_SLOWNESS="30000"))


def test_buffers_have_a_largest_size(program, calls):
    """Scratch memory then stays in several buffers, and these are reused."""
    name, arguments, expected = add(F32, count=20000)
    calls.add(f"{name}_float", *arguments)
    ((status, count, error, (found,)),) = calls.run(program, "--repeat", "3", METAL_RUNTIME_LARGEST="100000")
    assert (status, count) == ("METALCORE_OK", 0), error
    torch.testing.assert_close(found.double(), expected[0], rtol=1e-6, atol=1e-6)
    too_large = Calls(calls.folder)
    too_large.add(f"{name}_float", *arguments)
    ((status, _, _, results),) = too_large.run(program, METAL_RUNTIME_LARGEST="70000")
    assert status == "METALCORE_OUT_OF_MEMORY" and untouched(results)


def test_arrays_in_shared_memory_are_not_copied(program, calls):
    """Three arrays of 1 MiB fit into the GPU's memory, and their copies do not. A smaller call goes on."""
    for count in (2**18, 16):
        name, arguments, _ = add(F32, count=count)
        calls.add(f"{name}_float", *arguments)
    memory = str(7 * 2**19)
    reports = calls.run(program, "--allocate", "1", METAL_RUNTIME_MEMORY=memory)
    assert [status for status, *_ in reports] == ["METALCORE_OK"] * 2
    reports = calls.run(program, METAL_RUNTIME_MEMORY=str(2**21))
    assert [status for status, *_ in reports] == ["METALCORE_OUT_OF_MEMORY", "METALCORE_OK"]
    assert untouched(reports[0][3]) and not untouched(reports[1][3])


def test_arguments_are_refused(program, calls):
    for arguments in REFUSED.values():
        calls.add(*as_words(arguments))
    for text, (function, *_), (status, _, error, results) in zip(REFUSED, REFUSED.values(), calls.run(program)):
        assert (status, error) == ("METALCORE_INVALID_ARGUMENT", f"metalcore_{function}: {text.strip()}")
        assert untouched(results)


@pytest.mark.parametrize(
    "environment, status, says",
    [
        (
            {"METAL_RUNTIME_REFUSES": "softmax"},
            "METALCORE_NO_DEVICE",
            r"Metal refused activation/softmax\.metal: .*Compiler encountered an internal error",
        ),
        (
            {"METAL_RUNTIME_FAILS": "softmax"},
            "METALCORE_FAILED",
            r"Metal: a command buffer failed: Caused GPU Timeout Error",
        ),
    ],
    ids=["compiler", "GPU"],
)
def test_failures(program, calls, environment, status, says):
    """Results are as they were, and the context serves the next call."""
    for _ in range(2):
        name, arguments, _ = softmax(F32)
        calls.add(f"{name}_float", *arguments)
    name, arguments, expected = add(F32, count=1)
    calls.add(f"{name}_float", *arguments)
    *failed, last = calls.run(program, **environment)
    for found, _, error, results in failed:
        assert found == status and re.search(says, error) and untouched(results), error
    check([("add_float", arguments, expected)], [last])


def test_a_pipeline_with_fewer_threads_than_a_plan_needs(program, calls):
    name, arguments, _ = softmax(F32)
    calls.add(f"{name}_float", *arguments)
    ((status, _, error, results),) = calls.run(program, METAL_RUNTIME_THREADS="1")
    assert status == "METALCORE_NO_DEVICE" and "its pipeline takes up to 1" in error and untouched(results)


CREATE = """
#include <metalcore.h>
#include <stdio.h>
int main(void) {
  metalcore_context* context = (metalcore_context*)1;
  int status = metalcore_context_create(&context, DEVICE, 0, STREAM);
  printf("%s %d %s", metalcore_status_name(status), context != NULL, metalcore_last_error());
  return 0;
}
"""


@pytest.mark.parametrize(
    "device, stream, environment, says",
    [
        ("METALCORE_METAL", "NULL", {}, "METALCORE_OK 1 "),
        (
            "METALCORE_METAL",
            "&context",
            {},
            "METALCORE_INVALID_ARGUMENT 0 metalcore_context_create: index and stream must be 0 for METALCORE_METAL",
        ),
        (
            "METALCORE_METAL",
            "NULL",
            {"METAL_RUNTIME_DEVICES": "0"},
            "METALCORE_NO_DEVICE 0 metalcore_context_create: this machine has no Metal device",
        ),
        (
            "METALCORE_METAL",
            "NULL",
            {"METALCORE_LIBRARY_DIR": "/none"},
            "METALCORE_NO_KERNELS 0 metalcore_context_create: there are no kernels in '/none'",
        ),
        (
            "METALCORE_CPU",
            "NULL",
            {},
            "METALCORE_NO_DEVICE 0 metalcore_context_create: this platform's library has no contexts for METALCORE_CPU",
        ),
    ],
    ids=["right", "a stream", "no device", "no kernels", "a device of other platforms"],
)
def test_contexts(library, tmp_path, device, stream, environment, says):
    source = tmp_path / "create.c"
    source.write_text(CREATE)
    program = linked(source, tmp_path / "create", library, f"-DDEVICE={device}", f"-DSTREAM={stream}")
    done = subprocess.run([program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(says)


SHARED = """
#include <assert.h>
#include <metalcore.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

static float x[9] = {1, 2, 3, 4, 5, 6, 7, 8, 9}, y[9];
static float* shared;

static void* other(void* unused) {
  assert(metalcore_add_float(shared, shared, y, 8) == METALCORE_OK && y[7] == 2);
  return unused;
}

int main(void) {
  pthread_t thread;
  int i;
  /* One array as two arguments; arrays that overlap, and are read; a result in the place of one of them. */
  assert(metalcore_add_float(x, x, y, 8) == METALCORE_OK);
  for (i = 0; i < 8; ++i) assert(y[i] == 2 * x[i]);
  assert(metalcore_add_float(x, x + 1, y, 8) == METALCORE_OK);
  for (i = 0; i < 8; ++i) assert(y[i] == 2 * i + 3);
  assert(metalcore_add_float(x, y, x, 8) == METALCORE_OK);
  for (i = 0; i < 8; ++i) assert(x[i] == 3 * i + 4);
  assert(x[8] == 9);
  assert(metalcore_gemm_float(x, x, NULL, y, 2, 2, 2, 0, 1, 2, 3) == METALCORE_OK); /* of one begin, and other ends */
  assert(y[0] == 65 && y[1] == 13 * 4 + 16 * 7 && y[2] == 10 * 4 + 13 * 7);
  /* Memory that calls do not copy serves other threads too. */
  shared = x;
  assert(metalcore_memory_allocate(0, (void**)&shared) == METALCORE_OK && !shared);
  assert(metalcore_memory_allocate(4, NULL) == METALCORE_INVALID_ARGUMENT);
  assert(metalcore_memory_allocate((size_t)1 << 60, (void**)&shared) == METALCORE_OUT_OF_MEMORY && !shared);
  assert(metalcore_memory_allocate(32, (void**)&shared) == METALCORE_OK && (size_t)shared % 256 == 0);
  for (i = 0; i < 8; ++i) shared[i] = 1;
  assert(!pthread_create(&thread, NULL, other, NULL) && !pthread_join(thread, NULL));
  assert(metalcore_memory_free(shared) == METALCORE_OK && metalcore_memory_free(NULL) == METALCORE_OK);
  return 0;
}
"""


def test_arrays_that_are_shared(library, tmp_path):
    source = tmp_path / "shared.c"
    source.write_text(SHARED)
    done = subprocess.run([linked(source, tmp_path / "shared", library)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_needs_neither_python_nor_torch(library):
    for command in (["ldd", library], ["nm", "-D", "--undefined-only", library]):
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.lower()
        said = re.sub(r"\b(0x)?[0-9a-f]{16}\b", "", said)  # addresses
        assert not [word for word in ("torch", "c10", "python", "_py", "aoti") if word in said]


# Faults of csrc/c_api/metal: (file, old text, new text, what is said of one of the calls below).
SEEDED = {
    "no wait": ("commands.mm", "[buffer_ waitUntilCompleted];", "", "a command buffer failed"),
    "no commit": ("commands.mm", "[buffer_ commit];", "", "a wait for a command buffer that is not committed"),
    "an encoder that is not ended": (
        "commands.mm",
        "  end_encoder();\n  std::string",
        "  std::string",
        "its encoder is open",
    ),
    "results that are not copied back": ("memory.mm", "if (array.written && array.copy)", "if (false)", "wrong result"),
    "an updated array that is not copied": (
        "memory.mm",
        "if (array.read) std::memcpy",
        "if (array.read && !array.written) std::memcpy",
        "wrong result",
    ),
    "offsets left out": ("memory.mm", "reinterpret_cast<uintptr_t>(address) - buffer.begin", "0", "wrong result"),
    "copies at other alignments than the arrays": (
        "memory.mm",
        "reinterpret_cast<uintptr_t>(data) % kAlignment",
        "0 * kAlignment",
        "misaligned access",
    ),
    "a buffer for each array": ("memory.mm", "running().arena.take(", "allocate(", "objects are made"),
}


def said_of_calls(program, folder, **environment):
    calls = Calls(folder)
    aside = softmax(F32, batch=3, vocab=64, offset=4, out_offset=4)
    cases = [softmax(F32), aside, add(F32, count=50), paged_append(F32), batch_decode(F32)]
    for name, arguments, _ in cases:
        calls.add(f"{name}_float", *arguments)
    said = []
    for (_, _, expected), (_, count, error, results) in zip(
        cases, calls.run(program, "--repeat", "3", METALCORE_CHECK="1", **environment), strict=True
    ):
        near = all(torch.allclose(found.double(), wanted, rtol=1e-4) for found, wanted in zip(results, expected))
        said += [error] if error else ["" if near else "wrong result", "objects are made" if count else ""]
    return {*filter(None, said)}


@pytest.mark.parametrize("fault", SEEDED)
def test_seeded_faults_are_found(library, tmp_path, fault):
    file, old, new, says = SEEDED[fault]
    program = linked(HERE / "calls.c", tmp_path / "calls", build_for_c((fault, file, old, new)))
    said = said_of_calls(program, tmp_path, METALCORE_LIBRARY_DIR=str(library.parent))
    assert any(says in text for text in said), said


def test_nothing_is_found_where_no_fault_is_seeded(program, tmp_path):
    assert not said_of_calls(program, tmp_path)
