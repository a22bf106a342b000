"""What the host pays for a call of every op, on its smallest sample, against PyTorch's op.

Three modes: under no_grad; forward with grad, whose graph is made; forward and backward. "overridden" is PyTorch's own
function while enable_pytorch_overrides() is on for it, against the same function without. Three cases show what Python
costs at least: "operator" calls silu's operator without a function around it, against PyTorch's silu, and
"autograd.Function" is a derivative in Python that computes nothing, against PyTorch's silu, or that calls PyTorch's own
two kernels of softmax, against PyTorch's softmax.
"""

import contextlib
import ctypes
import functools

import torch

import metalcore
from metalcore._core.registry import OPS

from ..harness.case import Sampled, Samples, family, size_text

# What a sample may take, and how many calls it is made of at most: fewer on a GPU than its queue holds, so that the
# host never waits for it.
SECONDS = {"gpu": 0.01, "simulator": 0.01, "quick": 1e-4}
MOST_CALLS = 500
# no_grad may take so many seconds more than PyTorch, and both passes so large a share of its time.
TARGETS = {"no_grad": {"excess": 2e-6}, "forward": {}, "forward+backward": {"speedup": 1 / 1.15}}


@family
def call_overhead(scale):
    cases = [case for op in OPS.values() for case in cases_of(op, scale)]
    cases.append(Sampled(name="operator no_grad", sample=functools.partial(operator_alone, scale)))
    for name, functions in DERIVATIVES.items():
        cases.append(Sampled(name=name, sample=functools.partial(derivative_in_python, functions, scale)))
    return [*cases, Sampled(name="bare launch", sample=lambda run: launch(run, scale))] if scale == "gpu" else cases


def cases_of(op, scale):
    sample = op.smallest_sample()
    for overridden in (False, True) if op.override else (False,):
        for mode in TARGETS if op.backward and sample.backward else ("no_grad",):
            yield Sampled(
                name=f"{op.name} {mode}{', overridden' if overridden else ''}",
                shape=", ".join(map(size_text, sample.shapes)),
                dtype=torch.float32,
                targets=TARGETS[mode],
                sample=functools.partial(compare, op, sample, mode, overridden, scale),
            )


def compare(op, sample, mode, overridden, scale, run):
    device = run.device
    switch = functools.partial(metalcore.enable_pytorch_overrides, op.name) if overridden else contextlib.nullcontext
    function = op.reference if overridden else op.function
    with device.session(), torch.set_grad_enabled(mode != "no_grad"):
        with switch():
            ours = bind(op, sample, function, device.ours, mode)
        theirs = bind(op, sample, op.reference, device.theirs, mode)
        return compared(run, [(switch, ours), (contextlib.nullcontext, theirs)], scale)


def bind(op, sample, function, device, mode):
    """Returns the call without arguments that is timed."""
    tensors = sample.make(device, torch.float32)
    if mode != "no_grad":
        tensors = [tensor.requires_grad_() for tensor in tensors]
    # What is made from no tensor of the sample, as a table, is a constant.
    arguments, leaves = list(sample.arguments(*tensors)), []
    for i, value in enumerate(arguments):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            arguments[i] = value.detach().requires_grad_()
            leaves.append(arguments[i])
    forward = functools.partial(op.call, function, *arguments, **sample.options)
    if mode != "forward+backward":
        return forward
    directions = [torch.randn_like(output) for output in results_with_grad(forward())]
    return lambda: torch.autograd.grad(results_with_grad(forward()), leaves, directions, allow_unused=True)


def results_with_grad(found):
    found = [found] if isinstance(found, torch.Tensor) else found
    return [value for value in found if isinstance(value, torch.Tensor) and value.requires_grad]


class Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.detach()

    @staticmethod
    def backward(ctx, grad):
        return grad


def own_softmax(x):
    return torch._softmax(x, 0, False)


class Softmax(torch.autograd.Function):
    """PyTorch's own kernels: what a derivative in Python costs, whatever its kernels are."""

    @staticmethod
    def forward(ctx, x):
        y = own_softmax(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return torch._softmax_backward_data(grad, y, 0, y.dtype)


# Functions with a derivative in Python, and with PyTorch's own in C++.
DERIVATIVES = {
    "autograd.Function": (Nothing.apply, torch.nn.functional.silu),
    "autograd.Function of PyTorch's softmax": (Softmax.apply, own_softmax),
}


def derivative_in_python(functions, scale, run):
    def side(function, device):
        x = torch.ones(16, device=device, requires_grad=True)
        grad = torch.ones_like(x)
        return contextlib.nullcontext, lambda: torch.autograd.grad(function(x), x, grad)

    device = run.device
    ours, theirs = functions
    # PyTorch's kernels on both sides: a simulated device has none, and calls them on the CPU.
    with device.session():
        return compared(run, [side(ours, device.theirs), side(theirs, device.theirs)], scale)


def operator_alone(scale, run):
    """What each operator of an extension costs: its arguments come in boxes, those of PyTorch's own do not."""
    device = run.device
    with device.session(), torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        ours = functools.partial(torch.ops.metalcore.silu.default._op, torch.ones(16, device=device.ours))
        theirs = functools.partial(torch.nn.functional.silu, torch.ones(16, device=device.theirs))
        return compared(run, [(contextlib.nullcontext, ours), (contextlib.nullcontext, theirs)], scale)


def launch(run, scale):
    with run.device.session():
        sides = [(contextlib.nullcontext, call) for call in bare_launch()]
        (launched, refused), calls = host_seconds(run, sides, scale)
        return Samples(ours=[a - b for a, b in zip(launched, refused)], method=method(run.device), calls=calls)


def compared(run, sides, scale):
    (ours, theirs), calls = host_seconds(run, sides, scale)
    return Samples(ours=ours, theirs=theirs, method=method(run.device), calls=calls)


def host_seconds(run, sides, scale):
    """Seconds of the host per call, a list per side, in turns, and how many calls a sample has. A side is a context,
    which is not timed, and a call in it. What the device does meanwhile does not count."""
    device, times = run.device, [[] for _ in sides]
    calls = 1
    for round_ in range(-2, run.rounds):  # the first warms up, the second tells how many calls there is time for
        found = [seconds(device, side, calls) for side in sides]
        if round_ == -1:
            calls = max(1, min(MOST_CALLS, int(SECONDS[scale] / max(found))))
        if round_ >= 0:
            for side, value in zip(times, found):
                side.append(value)
    return times, calls


def seconds(device, side, calls):
    switch, call = side
    with switch():
        device.synchronize()
        begin = device.clock()
        for _ in range(calls):
            call()
        return (device.clock() - begin) / calls


def method(device):
    return "host's time" if device.scale == "gpu" else device.method


# What the host pays for launching an empty kernel on an NVIDIA GPU, without any framework.
PTX = b".version 7.0\n.target sm_52\n.address_size 64\n.visible .entry empty() { ret; }\n"


def bare_launch():
    """Returns (launch, refused): the first function launches an empty kernel. The second makes the same call with a
    grid of no threadgroups, which the driver refuses at once. The difference of their times is the launch without
    ctypes."""
    cuda = ctypes.CDLL("libcuda.so.1")
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    torch.cuda.synchronize()  # makes the device's primary context current
    _check(cuda.cuModuleLoadData(ctypes.byref(module), PTX))
    _check(cuda.cuModuleGetFunction(ctypes.byref(kernel), module, b"empty"))
    grid, *rest = [ctypes.c_uint(value) for value in (1, 1, 1, 32, 1, 1, 0)]
    stream, none = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream), ctypes.c_uint(0)
    call = cuda.cuLaunchKernel
    _check(call(kernel, grid, *rest, stream, None, None))
    return lambda: call(kernel, grid, *rest, stream, None, None), lambda: call(kernel, none, *rest, stream, None, None)


def _check(status):
    if status:
        raise RuntimeError(f"libcuda: error {status} from an empty kernel")
