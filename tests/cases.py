"""Every op's samples, forward and backward. They are for tests about where and how ops run, not about their numbers.

for case in CASES.values():
    made = case.make("cuda")
    results = made.run()         # outputs and gradients
    made.refill(seed=1)          # other numbers in the same tensors
"""

import warnings
from dataclasses import dataclass

import torch

from metalcore._core.accuracy import directed
from metalcore._core.registry import OPS, Op, Sample
from metalcore.recording import on_meta


@dataclass(frozen=True)
class Case:
    op: Op
    sample: Sample

    def call(self, *leaves):
        """The outputs, a list of tensors."""
        return self.op.compute(self.sample, leaves)

    def leaves(self, device, dtype=torch.float32, seed=0):
        return [tensor.requires_grad_(self.backward) for tensor in self.sample.make(device, dtype, seed)]

    @property
    def backward(self):
        return self.op.backward and self.sample.backward

    @property
    def backward_without_host(self):
        """Whether a CUDA graph can capture the derivative. Those of qr and vander consist of PyTorch's ops, and a graph
        cannot capture some of them."""
        return self.backward and self.op.name not in ("qr", "svd_lowrank", "pca_lowrank", "vander")

    def make(self, device, dtype=torch.float32, seed=0):
        return Made(self, device, dtype, seed)


class Made:
    """A case with its tensors."""

    def __init__(self, case, device, dtype, seed):
        self.case = case
        self.leaves = case.leaves(device, dtype, seed)
        self.directions = directed(self.forward())[1]

    def refill(self, seed):
        with torch.no_grad():
            for leaf, value in zip(self.leaves, self.values(seed)):
                leaf.copy_(value)

    def values(self, seed):
        """The tensors that refill(seed) copies into the leaves, on their device."""
        return self.case.sample.make(self.leaves[0].device, self.leaves[0].dtype, seed)

    def forward(self):
        torch.manual_seed(0)  # some ops draw random numbers
        return self.case.call(*self.leaves)

    def run(self):
        """The outputs, and the gradients of random linear functions of them."""
        return self.with_gradients(self.forward())

    def with_gradients(self, outputs):
        gradients = self.gradients(outputs, self.directions) if self.case.backward else ()
        return [*(output.detach() for output in outputs), *gradients]

    def gradients(self, outputs, directions):
        outputs = [output for output in outputs if output.requires_grad]
        # The gradient of a sum is the direction itself. Callers may write into what they get.
        return torch.autograd.grad(outputs, self.leaves, [direction.clone() for direction in directions])


CASES = {f"{op.name}, {sample.name}": Case(op, sample) for op in OPS.values() for sample in op.samples()}


def form(case):
    """What the host's code sees of a case: all apart from sizes, which choose kernels."""
    sample = case.sample
    arguments = getattr(sample.arguments, "__code__", sample.arguments)
    shapes = [(len(shape), 0 in shape, shape[-2:-1] < shape[-1:]) for shape in sample.shapes]
    return case.op.name, arguments, str(sorted(sample.options.items())), str(shapes)


_LARGEST_FIRST = sorted(CASES, key=lambda name: -CASES[name].sample.elements)
# The smallest case of each form.
FORMS = sorted({form(CASES[name]): name for name in _LARGEST_FIRST}.values())
# The host does not wait for these ops, so that graphs go on without it.
WITHOUT_HOST = {name: case for name, case in CASES.items() if not case.op.waits}


def launching_all():
    """Yields (op, sample): the first sample of each op, and those that launch a kernel that none before launches."""
    launched = set()
    for op in OPS.values():
        for number, sample in enumerate(op.samples()):
            with torch.no_grad(), on_meta("mps") as recorder:
                op.compute(sample, [torch.empty(shape, device="meta") for shape in sample.shapes])
            kernels = set(recorder.recording.kernels)
            if number == 0 or not kernels <= launched:
                yield op, sample
            launched |= kernels


class Call:
    """A call of an op, or of another function, with a sample's arguments. None of these is a leaf."""

    def __init__(self, op, sample, device, dtype, function=None):
        self.leaves = [tensor.requires_grad_() for tensor in sample.make(device, dtype)]
        given = sample.arguments(*(leaf * 1 for leaf in self.leaves))
        self.given = [value.clone() if isinstance(value, torch.Tensor) else value for value in given]
        torch.manual_seed(0)  # some ops draw random numbers
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            returned = op.call(function or op.function, *self.given, **sample.options)
        self.outputs = [returned] if isinstance(returned, torch.Tensor) else list(returned)
        results = [result for result in op.results(returned) if result.requires_grad]
        # The sum saves the constant factors alone.
        self.total = sum(
            (result * torch.linspace(1, 2, result.numel()).view(result.shape).to(result)).sum().real
            for result in results
        )

    def tensors(self):
        return [value for value in (*self.given, *self.outputs) if isinstance(value, torch.Tensor)]

    def gradients(self):
        found = torch.autograd.grad(self.total, self.leaves, allow_unused=True)
        return [gradient for gradient in found if gradient is not None]


def changed(make, which):
    """The gradients where one tensor was changed after the forward pass, or None where that is an error."""
    call = make()
    tensor = call.tensors()[which]
    with torch.no_grad():
        tensor.mul_(3) if tensor.is_floating_point() or tensor.is_complex() else tensor.zero_()
    try:
        return call.gradients()
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return None


def operators(function):
    """The metalcore operators that a call runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    prefix = "metalcore::"
    return {event.key.removeprefix(prefix) for event in profile.key_averages() if event.key.startswith(prefix)}
