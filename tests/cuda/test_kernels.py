"""When the backend compiles and loads kernels, how it reports errors, and the parameter block that a launch passes."""

import pytest


def test_once_for_each_layout_and_architecture(run):
    run("""
compiler = Compiler()
for _ in range(3):
    for device in (0, 1):
        dispatch("one", [(8, 8)], device=device)
        dispatch("one", [b"x"], device=device)
        dispatch("one", [(8, 8)], device=device, program=7)
assert len(compiler.calls) == len(set(map(str, compiler.calls))) == 6
assert {arch for arch, _ in compiler.calls} == {90, 80}
assert driver.fake_loads() == driver.fake_functions() == 6
""")


def test_threads_that_need_the_same_kernel_at_once(run):
    """The backend calls the compiler without a lock: a slow compilation in one thread does not delay other kernels."""
    run("""
import threading
class Slow(Compiler):
    def __call__(self, arch, requests):
        if requests[0][1] == "slow":
            self.started.set()
            assert self.quick_ran.wait(60)
        return super().__call__(arch, requests)
compiler = Slow()
compiler.started, compiler.quick_ran = threading.Event(), threading.Event()
threads = [threading.Thread(target=dispatch, args=("slow",)) for _ in range(4)]
for thread in threads: thread.start()
assert compiler.started.wait(60)
dispatch("quick")
compiler.quick_ran.set()
for thread in threads: thread.join()
assert len(launches()) == 5
assert driver.fake_loads() == driver.fake_functions() == 2
""")


def test_an_exception_of_the_compiler_arrives_as_it_is(run):
    assert (
        run("""
import traceback
class Refusal(SyntaxError): pass
def refuse(arch, requests): raise Refusal("line 7: no such function")
C.cuda_set_compiler(refuse)
for call in (lambda: dispatch("bad"), lambda: C.cuda_attributes(0, "bad", "b0", 0)):
    try:
        call()
    except Refusal as error:
        assert traceback.extract_tb(error.__traceback__)[-1].name == "refuse"
        print(error)
Compiler()
assert len(dispatch("bad")) == 1
""").splitlines()
        == ["line 7: no such function"] * 2
    )


@pytest.mark.parametrize(
    "answer, kind, message",
    [
        ("[]", "RuntimeError", "returned 0 results for 1 requests"),
        ("None", "TypeError", ""),
        ("[('text', 'k', '')]", "TypeError", "bytes"),
        ("[(b'no code', 'k')]", "IndexError", "index"),
        ("[(b'no code', 'k', '')]", "RuntimeError", "loading kernel 'k' (b0) failed: CUDA_ERROR_INVALID_VALUE"),
        (
            "[(b'entry k block 64 threads 1 shared 0', 'm', 'a.metal')]",
            "RuntimeError",
            "loading kernel 'k' of a.metal (b0) failed: CUDA error",
        ),
    ],
)
def test_answers_that_are_none(run, answer, kind, message):
    assert message in run(f"""
C.cuda_set_compiler(lambda arch, requests: {answer})
print(refusal({kind}, buffers=[(8, 8)]))
""")


def test_without_a_compiler(run):
    assert "no compiler of CUDA kernels has been set" in run("C.cuda_set_compiler(None)\nprint(refusal(RuntimeError))")


def test_loading_while_a_stream_is_captured(run):
    run("""
Compiler()
driver.fake_capture(1)
dispatch("captured", lengths=[16])
assert driver.fake_capture_mode() == 0
refusal(ValueError, "too_many", group=(1025, 1, 1))
assert driver.fake_capture_mode() == 0
""")


def test_attributes(run):
    run("""
compiler = Compiler(threads=640, shared=96)
assert C.cuda_attributes(3, "k", "b0,t1,i2:0", 0) == {
    "max_threads": 640, "static_threadgroup_memory": 96, "registers": 40, "local_bytes": 8}
C.cuda_attributes(3, "k", "b0,t1,i2:0", 0)
assert compiler.calls == [(90, [(3, "k", "b0,t1,i2:0")])]
C.cuda_attributes(3, "k", "", 1)
dispatch("k", [], program=3, device=1)
assert len(compiler.calls) == 2
""")


@pytest.mark.parametrize(
    "signature",
    ["x0", "b", "b31", "b0,", ",b0", "b0,b0", "i0", "i0:8", "i0:272", "i0:8192", "b0,i0:16", "b0 b1", "b-1"],
)
def test_signatures_that_are_none(run, signature):
    assert f"'{signature}' is not a signature such as b0,b1,t0,i2:48" in run(f"""
Compiler()
try:
    C.cuda_attributes(0, "k", "{signature}", 0)
except ValueError as error:
    print(error)
""")


def test_every_kind_of_binding(run):
    run("""
compiler = Compiler()
table = [(0x10, 4), (0, 0), (0x30, 4)]
launch, = dispatch("every", [(0x7000, 64), bytes(range(20)), None, table, (0x7fff00000008, 0)], [100, 0, 4096],
                   threads=(10, 3, 1), group=(4, 2, 1), program=5)
assert compiler.calls == [(90, [(5, "every", "b0,b4,t0,t2,i1:32,i3:32")])]
assert launch.values == {
    "b0": 0x7000, "b4": 0x7fff00000008, "t0": 0, "t2": 112,
    "i1": bytes(range(20)) + bytes(12), "i3": struct.pack("<3Q", 0x10, 0, 0x30) + bytes(8),
}
assert launch.shared == 112 + 4096
assert launch.threads_per_grid == (10, 3, 1) and launch.threads_per_threadgroup == launch.block == (4, 2, 1)
assert launch.threadgroups_per_grid == launch.grid == (3, 2, 1) and launch.first_threadgroup == (0, 0, 0)
assert (launch.device, launch.stream, launch.program) == (0, 0, 5)
""")


@pytest.mark.parametrize("addresses", [0, 1, 2, 31])
def test_bytes_begin_at_multiples_of_16(run, addresses):
    run(f"""
Compiler()
count = {addresses}
bindings = [(0x100 * i, 4) for i in range(min(count, 30))]
launch, = dispatch(buffers=[*bindings, b"tail"], lengths=[16] * (count - len(bindings)))
assert all(launch.values[f"b{{i}}"] == 0x100 * i for i in range(len(bindings)))
assert launch.values[f"i{{len(bindings)}}"] == b"tail" + bytes(12)
""")


def test_capacities(run):
    """Bytes of different sizes share a kernel: capacities are multiples of 16 up to 256, and then powers of two."""
    run("""
compiler = Compiler()
expected = {1: 16, 15: 16, 16: 16, 17: 32, 255: 256, 256: 256, 257: 512, 512: 512, 513: 1024, 1024: 1024, 2047: 2048,
            2049: 4096, 4096: 4096}
for size, capacity in expected.items():
    content = bytes(i * 7 % 251 for i in range(size))
    launch, = dispatch(buffers=[content])
    assert launch.signature == f"i0:{capacity}" and launch.values["i0"] == content + bytes(capacity - size), size
assert len(compiler.calls) == len(set(expected.values()))
""")


def test_the_largest_table_and_the_largest_block(run):
    run("""
Compiler()
table = [(i * 4096, 8) for i in range(512)]
launch, = dispatch(buffers=[table])
assert launch.values["i0"] == struct.pack("<512Q", *(i * 4096 for i in range(512)))
launch, = dispatch(buffers=[bytes([i]) * 4096 for i in range(7)])
assert [launch.values[f"i{i}"] for i in range(7)] == [bytes([i]) * 4096 for i in range(7)]
assert "kernel 'k': 32816 bytes of arguments; NVIDIA GPUs take 32764" in refusal(ValueError, buffers=[bytes(4096)] * 8)
""")


def test_a_kernel_of_another_block_is_noticed(run):
    assert "takes 64 bytes of parameters, not 80" in run("""
class Wrong(Compiler):
    def __call__(self, arch, requests):
        return [self.code("k", 64)]
Wrong()
print(refusal(RuntimeError, buffers=[(8, 8), b"x"]))
""")


@pytest.mark.parametrize(
    "bindings, message",
    [
        ("buffers=[None] * 32", "kernel 'k': index 31; arguments have indices up to 30"),
        ("lengths=[16] * 32", "kernel 'k': index 31; arguments have indices up to 30"),
        ("buffers=[bytes(4097)]", "kernel 'k': bytes at index 0 are 4097; Metal allows 4096"),
        ("buffers=[None, [(0, 0)] * 513]", "kernel 'k': a table of 513 pointers at index 1; at most 512 fit"),
        ("group=(0, 1, 1)", "kernel 'k': a threadgroup of no threads"),
        ("group=(32, 33, 1)", "a threadgroup of (32, 33, 1) threads; on this GPU it may have up to 1024"),
        ("group=(1, 1)", "group must have three numbers"),
        ("buffers=['x']", "a buffer is None, (address, nbytes), bytes or a list of (address, nbytes)"),
    ],
)
def test_what_is_refused(run, bindings, message):
    assert message in run(f"Compiler()\nprint(refusal(ValueError, {bindings}))")
