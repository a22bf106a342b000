"""Programs that use kernels for the first time. Each has a process and a cache of compiled kernels of its own.

METALCORE_CACHE_DIR=<an empty directory> python tests/cuda_device/first_use.py threads
"""

import sys
import threading
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

import torch  # noqa: E402
from cases import CASES, WITHOUT_HOST  # noqa: E402

import metalcore  # noqa: E402
from metalcore.recording import on_meta  # noqa: E402


def check(found, expected):
    for value, wanted in zip(found, expected):
        torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-4)


def in_threads(*functions):
    """Runs functions at the same time, each in a thread of its own, and raises the first exception."""
    start, failures = threading.Barrier(len(functions)), []

    def run(function):
        try:
            start.wait()
            function()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def threads():
    """Eight threads have a stream each. Pairs of them begin with the same op."""
    results = {}

    def work(number):
        cases = list(CASES)
        with torch.cuda.stream(torch.cuda.Stream()):
            for i in range(len(cases)):
                name = cases[(number // 2 * 5 + i) % len(cases)]
                made = CASES[name].make("cuda")
                results[name, number] = made.run()
            torch.cuda.current_stream().synchronize()

    in_threads(*[lambda number=number: work(number) for number in range(8)])
    for name in CASES:
        for number in range(8):
            check(results[name, number], results[name, 0])


def capture():
    """The kernels of each op and of its derivative are compiled and loaded while a graph is captured."""
    ones = torch.ones(3, 3, device="cuda", requires_grad=True)
    (ones @ ones).sum().backward()  # first use of PyTorch, and of cuBLAS on both passes' threads
    image = torch.ones(1, 3, 5, 5, device="cuda", requires_grad=True)
    torch.nn.functional.conv2d(image, image).sum().backward()  # first use of cuDNN, for the derivative of conv2d
    for case in WITHOUT_HOST.values():
        if is_left_to_torch(case):
            continue  # cuSOLVER cannot be initialized during a capture
        leaves = case.leaves("cuda")
        run = with_gradients(case.call) if case.backward_without_host else case.call
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = run(*leaves)
        graph.replay()
        torch.cuda.synchronize()
        check([value.detach() for value in results], [value.detach() for value in run(*leaves)])


def is_left_to_torch(case):
    with on_meta("cuda") as recorder:
        case.call(*case.leaves("meta"))
    return any(plan.variant == "torch" for plan in recorder.recording.plans)


def with_gradients(call):
    def run(*leaves):
        outputs = call(*leaves)
        wanted = [output for output in outputs if output.requires_grad]
        return [*outputs, *torch.autograd.grad(wanted, leaves, [torch.ones_like(output) for output in wanted])]

    return run


def beside_a_capture():
    """One thread first uses kernels while another captures a graph. Its capture mode lets other threads allocate."""
    x, rows = torch.randn(1000, device="cuda"), torch.randn(50, 60, device="cuda")
    expected, stream = metalcore.silu(x), torch.cuda.Stream()
    results = []

    def use():
        with torch.cuda.stream(stream):
            results.append(metalcore.softmax(rows, -1))

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        in_threads(use)
        y = metalcore.silu(x)
    graph.replay()
    torch.cuda.synchronize()
    check([y, results[0]], [expected, torch.softmax(rows, -1)])


PROGRAMS = {program.__name__: program for program in (threads, capture, beside_a_capture)}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
