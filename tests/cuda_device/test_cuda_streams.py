"""Ops run on PyTorch's current stream, where their inputs come late."""

import pytest
import torch
from cases import CASES

each_case = pytest.mark.parametrize("name", CASES)


def late():
    """Keeps the current stream busy for some milliseconds: launches on other streams then run first."""
    torch.cuda._sleep(20_000_000)


def assert_same(found, expected):
    for value, wanted in zip(found, expected):
        torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-4)


def zero(tensors):
    with torch.no_grad():
        for tensor in tensors:
            tensor.zero_()


@each_case
def test_side_stream(name):
    made = CASES[name].make("cuda")
    expected, values = made.run(), made.values(0)
    zero(made.leaves)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late()
        with torch.no_grad():
            for leaf, value in zip(made.leaves, values):
                leaf.copy_(value)
        found = made.run()
    stream.synchronize()
    assert_same(found, expected)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.backward])
def test_backward_runs_on_the_stream_of_forward(name):
    """The caller of the backward pass is on another stream, where the gradients of the outputs come late."""
    made = CASES[name].make("cuda")
    expected, directions = made.run(), made.directions
    count = len(expected) - len(made.leaves)
    given = [torch.zeros_like(direction) for direction in directions]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        outputs = made.forward()
    late()
    for tensor, direction in zip(given, directions):
        tensor.copy_(direction)
    gradients = made.gradients(outputs, given)
    torch.cuda.current_stream().synchronize()
    assert_same(gradients, expected[count:])


@each_case
def test_many_streams_at_once(name):
    case = CASES[name]
    made = [case.make("cuda", seed=seed) for seed in range(4)]
    expected = [one.run() for one in made]
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in made], [None] * len(made)
    for _ in range(3):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[i] = made[i].run()
    torch.cuda.synchronize()
    for values, wanted in zip(found, expected):
        assert_same(values, wanted)
