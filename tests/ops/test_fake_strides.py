"""What an operator's fake kernel says of its results is what its kernel makes, for arguments with any strides. What
compilers allocate and read rests on it."""

import re

import pytest
import torch
from cases import FORMS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from metalcore._core.accuracy import directed
from metalcore._core.registry import OPS
from metalcore._core.routing import explained


def permuted(x):
    """The same values, with the first dimension last in memory."""
    return x.movedim(0, -1).contiguous().movedim(-1, 0)


def swapped(x):
    """The last two dimensions in the other order, or the first two of more: heads between tokens, as attention has."""
    a, b = (1, 2) if x.dim() > 3 else (-1, -2)
    return x.transpose(a, b).contiguous().transpose(a, b) if x.dim() > 1 else x


def sliced(x):
    """With gaps behind each row, and between the rows."""
    wide = x.new_zeros([size + 3 if d >= x.dim() - 2 else size for d, size in enumerate(x.shape)])
    place = wide[(..., *[slice(1, size + 1) for size in x.shape[-2:]])] if x.dim() else wide
    return place.copy_(x)


def expanded(x):
    """The first of the rows in place of all, without memory of their own."""
    return x[:1].expand(x.shape) if x.dim() > 1 and x.shape[0] else x


def channels_last(x):
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


LAYOUTS = (permuted, swapped, sliced, expanded, channels_last)


def calls():
    """The functions and the layouts that their arguments can have."""
    for name, op in OPS.items():
        if callable(op.function) and not isinstance(op.function, type):
            images = any(len(shape) == 4 for sample in op.samples() for shape in sample.shapes)
            yield from ((name, layout) for layout in LAYOUTS if images or layout is not channels_last)


def layout_of(tensor):
    """What a compiler is told. The stride of a dimension with one element counts for nothing."""
    strides = [stride for stride, size in zip(tensor.stride(), tensor.shape) if size != 1]
    return tuple(tensor.shape), () if tensor.numel() == 0 else tuple(strides), tensor.dtype


class Compared(TorchDispatchMode):
    """Compares each call of an operator with its fake kernel."""

    def __init__(self):
        super().__init__()
        self.wrong, self.calls = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        ours = func.namespace == "metalcore" and not func.name().startswith("metalcore::_")  # those are recordings'
        if ours:
            with FakeTensorMode() as fakes:
                as_fake = lambda x: fakes.from_tensor(x) if isinstance(x, torch.Tensor) else x  # noqa: E731
                expected = func(*tree_map(as_fake, args), **tree_map(as_fake, kwargs or {}))
        found = func(*args, **(kwargs or {}))
        if ours:
            self.calls += 1
            real, fake = ([t for t in tree_flatten(x)[0] if isinstance(t, torch.Tensor)] for x in (found, expected))
            pairs = list(zip(map(layout_of, real), map(layout_of, fake), strict=True))
            self.wrong += [f"{func}: real {a}, fake {b}" for a, b in pairs if a != b]
        return found


def samples(op, layout):
    """All with the first layout. With the others it is the smallest of those that are alike for the host's code, which
    chooses the strides of results."""
    return [sample for sample in op.samples() if layout is LAYOUTS[0] or f"{op.name}, {sample.name}" in FORMS]


@pytest.mark.parametrize("name, layout", list(calls()), ids=lambda value: getattr(value, "__name__", value))
def test_fake_strides(device, name, layout):
    op, calls = OPS[name], 0
    for sample in samples(op, layout):
        torch.manual_seed(0)
        leaves = [
            layout(tensor).requires_grad_(op.backward and sample.backward)
            for tensor in sample.make(device, torch.float32)
        ]
        compared = Compared()
        explained.observers += 1
        try:
            with compared:
                given = [
                    layout(x) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
                    for x in sample.arguments(*leaves)
                ]
                outputs = list(op.results(op.call(op.function, *given, **sample.options)))
                differentiable = [output for output in outputs if output.requires_grad]
                if differentiable:
                    grads = [layout(direction) for direction in directed(differentiable)[1]]
                    torch.autograd.grad(differentiable, leaves, grads, allow_unused=True)
        except RuntimeError as error:  # memory that an op overwrites must have a layout
            if layout is not expanded and not re.search("^metalcore::.* must be (contiguous|neighbours)", str(error)):
                raise
            calls += 1
        finally:
            explained.observers -= 1
        assert not compared.wrong, f"{sample.name}: " + "; ".join(compared.wrong)
        calls += compared.calls
    assert calls or not op.operators
