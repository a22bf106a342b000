"""Random graphs of operations that PyTorch computes exactly, so that every bit must be equal."""

import random

import pytest
import torch
from traced import results

aten = torch.ops.aten
FLOATS = [
    *(torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum, aten.copysign.Tensor),
    *(torch.div, lambda a, b: torch.where(a > b, a, b), lambda a, b: a.masked_fill(b > 0, 0.5)),
    *(lambda a, b: aten.clamp_min.Tensor(a, b), lambda a, b: a * 2.5 - b, lambda a, b: aten.rsub.Scalar(a, 1.5) + b),
    *(lambda a, b: a.floor(), lambda a, b: a.round(), lambda a, b: a.abs(), lambda a, b: a.relu(), lambda a, b: -a),
    *(
        lambda a, b: a.clamp(-1.5, 2),
        lambda a, b: aten.threshold_backward(a, b.to(a.dtype), 0.25),
        lambda a, b: a.sign(),
    ),
]
INTEGERS = [
    *(torch.add, torch.sub, torch.mul, torch.maximum, torch.bitwise_and, torch.bitwise_xor),
    *(lambda a, b: a.abs(), lambda a, b: ~a, lambda a, b: torch.where(a > b, a, 7), lambda a, b: a.clamp(-5, 90)),
]
SHAPES = [(4, 6, 8), (6, 8), (8,), (4, 1, 8), (6, 1), ()]


def random_function(seed):
    """A function of a list of tensors, which makes the same graph each time: operations that mix dtypes and shapes."""

    def function(*tensors):
        chosen = random.Random(seed)
        values = list(tensors)
        for _ in range(14):
            a, b = chosen.choice(values), chosen.choice(values)
            floats = a.dtype.is_floating_point or b.dtype.is_floating_point
            made = chosen.choice(FLOATS if floats and a.dtype.is_floating_point else INTEGERS)
            if made in INTEGERS and floats:
                b = a
            values.append(made(a, b) if made is not aten.copysign.Tensor else made(a, b.to(a.dtype)))
            if chosen.random() < 0.2:
                values.append((values[-1] > 0).to(chosen.choice([torch.float32, torch.int32, torch.bfloat16])))
        return tuple(values[-6:])

    return function


@pytest.mark.parametrize("seed", range(4))
def test_random_graph(device, seed):
    torch.manual_seed(seed)
    chosen = random.Random(seed)
    dtypes = [torch.float32, torch.int32, chosen.choice([torch.bfloat16, torch.float16]), torch.int64, torch.float32]
    tensors = []
    for dtype in dtypes:
        shape = chosen.choice(SHAPES[:-1] if dtype.is_floating_point else SHAPES)
        numbers = torch.randn(shape) * 3
        tensors.append(numbers.to(dtype).to(device))
    for made, expected in results(random_function(seed), *tensors):
        assert (made.dtype, made.shape) == (expected.dtype, expected.shape)
        assert ((made.cpu() == expected) | (made.cpu().isnan() & expected.isnan())).all()
