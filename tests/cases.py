"""Every op's samples, forward and backward. They are for tests about where and how ops run, not about their numbers.

for case in CASES.values():
    made = case.make("cuda")
    results = made.run()         # outputs and gradients
    made.refill(seed=1)          # other numbers in the same tensors
"""

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
