"""The arguments of a program: which it takes, and what it does with those that lie otherwise."""

import math

import pytest
import torch
from agreement import agree
from torch import nn

import metalcore


def test_wrong_arguments_are_refused(device):
    module = nn.Linear(4, 3).to(device)
    program = metalcore.compile(module, (torch.randn(2, 4).to(device),))
    for wrong, message in [
        (torch.randn(3, 4).to(device), r"shape \[2, 4\], and not for \[3, 4\]"),
        (torch.randn(2, 4).to(device).half(), "dtype torch.float32"),
        (torch.randn(2, 4), f"device {device}"),
        (3, "must be a tensor"),
    ]:
        with pytest.raises(ValueError, match=message):
            program(wrong)
    with pytest.raises(ValueError, match="takes arguments like"):
        program()


def test_a_number_is_part_of_the_program(device):
    class Scaled(nn.Module):
        def forward(self, x, factor):
            return x * factor

    x = torch.randn(3).to(device)
    program = metalcore.compile(Scaled(), (x, 2.0))
    agree(x * 2, program(x, 2.0))
    with pytest.raises(ValueError, match=r"for 2\.0, and not for 3\.0"):
        program(x, 3.0)


def test_other_strides_give_the_same(device):
    class Flat(nn.Module):
        def forward(self, x):
            return x.view(-1) * 2

    x = torch.randn(4, 4).to(device)
    agree(x.mT.reshape(-1) * 2, metalcore.compile(Flat(), (x,))(x.mT))


def test_an_argument_with_other_strides_is_written_to(device):
    class Writes(torch.nn.Module):
        def forward(self, x, y):
            x[0].add_(1)
            return x * y

    module, x, y = Writes(), torch.randn(3, 4, device=device), torch.randn(3, 4, device=device)
    program = metalcore.compile(module, (x.clone(), y))
    given, wanted = (x.t().contiguous().t() for _ in range(2))
    assert torch.equal(program(given, y), module(wanted, y)) and torch.equal(given, wanted)


def test_nan_among_the_arguments_is_itself(device):
    class Fills(torch.nn.Module):
        def forward(self, x, fill):
            return torch.where(x > 0, x, fill)

    x = torch.randn(8, device=device)
    program = metalcore.compile(Fills(), (x, math.nan))
    agree(Fills()(x, math.nan), program(x, float("nan")))
    with pytest.raises(ValueError, match="for nan, and not for 0"):
        program(x, 0.0)


def test_keywords_and_keys_have_any_order(device):
    class Net(nn.Module):
        def forward(self, parts, *, scale, shift):
            return (parts["a"] - 2 * parts["b"]) * scale + shift

    a, b, scale, shift = (torch.randn(3).to(device) for _ in range(4))
    program = metalcore.compile(Net(), ({"a": a, "b": b},), {"scale": scale, "shift": shift})
    agree(Net()({"a": a, "b": b}, scale=scale, shift=shift), program({"b": b, "a": a}, shift=shift, scale=scale))
    for parts, keywords in (({"a": a}, {"scale": scale, "shift": shift}), ({"a": a, "b": b}, {"scale": scale})):
        with pytest.raises(ValueError, match="this program takes arguments like"):
            program(parts, **keywords)


def test_a_negated_view_is_read_negated(device):
    """The generated kernel's strides are those of the memory that it reads."""

    class Net(nn.Module):
        def forward(self, x):
            return x * 2 + 1, x.relu() - 3

    pairs = torch.arange(48.0).reshape(6, 4, 2).to(device)
    negated = torch.view_as_complex(pairs).conj().imag
    assert negated.is_neg()
    agree(Net()(negated), metalcore.compile(Net(), (pairs[..., 1],))(negated))
    agree(Net()(negated), torch.compile(Net(), backend="metalcore")(negated))


@pytest.mark.parametrize("strides", [(0, 1), (1, 1)])
def test_an_example_whose_elements_share_memory(device, strides):
    x = torch.randn(12).to(device)
    example = x.as_strided((3, 4), strides)
    program = metalcore.compile(nn.Tanh(), (example,))
    agree(example.tanh(), program(example))
    with pytest.raises(ValueError, match=r"strides \[\d, 1\], where elements share memory, and not for \[4, 1\]"):
        program(x.view(3, 4))


@pytest.mark.parametrize("options", [{"target": "apple"}, {"dtype": "half"}, {"dtype": torch.int32}], ids=str)
def test_options_of_other_types_are_refused_by_name(device, options):
    ((name, _),) = options.items()
    with pytest.raises(TypeError, match=f"{name} must be"):
        metalcore.compile(nn.Linear(4, 3).to(device), (torch.randn(2, 4).to(device),), **options)


def test_functions_are_no_modules(device):
    for wrong in (torch.sin, lambda x: x + 1, "model", nn.Linear):
        with pytest.raises(TypeError, match=r"metalcore.compile takes a torch.nn.Module or what torch.export.export"):
            metalcore.compile(wrong, (torch.randn(3).to(device),))
