"""When the backend compiles and loads kernels, and how it reports errors."""

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
