"""The memory that values of a program share: who may write there, and who counts elements from its begin."""

import pytest
import torch
import torch.nn.functional as F
from agreement import Calls, agree
from opinfo import find_op
from out_forms import check, find

import metalcore
from metalcore._core.arena import fixed_memory
from metalcore._core.out_forms import SEEN

each_place = pytest.mark.parametrize("place", ["cpu", "device"])


def both(function, tensors, where, **options):
    tensors = [tensor.to(where) for tensor in tensors]
    program = metalcore.compile(Calls(function), tuple(tensors), **options)
    agree(function(*tensors), program(*tensors))
    return program


@each_place
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    "loss", [F.binary_cross_entropy, F.mse_loss, F.smooth_l1_loss, F.huber_loss], ids=lambda f: f.__name__
)
@pytest.mark.lenient  # a Mac has no kernel of some
def test_reduced_losses_leave_their_neighbours_alone(device, place, loss, reduction):
    def function(x, y):
        a, b = x.sigmoid(), y.sigmoid()
        return loss(a, b, reduction=reduction) * 2, loss(b, a, reduction=reduction) + a.sum(), a.exp() + b

    both(function, torch.randn(2, 4, 5), device if place == "device" else "cpu", fusions=[])


@pytest.mark.parametrize(
    "name",
    [
        *("add", "addmm", "bmm", "cat", "cumsum", "index_select", "linalg.vector_norm", "mean", "nn.functional.gelu"),
        *("nn.functional.nll_loss", "softmax", "sum", "topk", "var", "where"),
    ],
)
def test_listed_forms_write_their_result(name):
    watch = find({name})
    assert watch.right and not watch.wrong
    assert {form.removeprefix("aten::") for form in watch.right} <= SEEN


@pytest.mark.parametrize(
    "name, form",
    [
        ("nn.functional.binary_cross_entropy", "binary_cross_entropy.out"),
        ("nn.functional.mse_loss", "mse_loss.out"),
        ("nn.functional.smooth_l1_loss", "smooth_l1_loss.out"),
        ("nn.functional.huber_loss", "huber_loss.out"),
    ],
)
def test_forms_that_write_more_are_found(name, form):
    assert torch.float32 in find_op(name).dtypes
    assert f"aten::{form}" in find({name}).wrong and form not in SEEN


def test_what_a_form_does_wrong():
    result = torch.arange(6.0).view(2, 3)
    assert check(lambda places: places[0].copy_(result), [result]) == ""
    assert "another result" in check(lambda places: None, [result])
    assert "beside" in check(lambda places: places[0].as_strided((7,), (1,)).fill_(0), [result])
    assert "shape" in check(lambda places: places[0].resize_(3, 2), [result])
    assert check(lambda places: 1 / 0, [result]) == "ZeroDivisionError: division by zero"


def test_nothing_grows_past_the_end(device):
    for where in ("cpu", device):
        memory = fixed_memory(64, torch.device(where))
        assert memory.device.type == where and memory.nbytes == 64
        with pytest.raises(RuntimeError, match="not resizable"):
            memory[60:].resize_(8)
        assert memory.untyped_storage().nbytes() == 64


def strided(x):
    y = x.cos() + x
    return y.as_strided((2, 2), (1, 2), 0), y.sum()


def strided_of_a_part(x):
    y = (x.cos() + x)[1:]
    return y.as_strided((2, 2), (1, 2), 1) * 2, y.as_strided((3,), (1,)) + 1, y


def strided_copy(x):
    y = x.cos() + x
    return torch.as_strided_copy(y, (2, 2), (1, 2), 2) + 1, torch.as_strided_scatter(
        y, y[:1, :2].exp(), (1, 2), (1, 1), 3
    )


@each_place
@pytest.mark.parametrize("fusions", [None, []], ids=["fused", "plain"])
@pytest.mark.parametrize("function", [strided, strided_of_a_part, strided_copy], ids=lambda f: f.__name__)
@pytest.mark.lenient
def test_as_strided_counts_from_the_value(device, place, function, fusions):
    def module(x):
        return function(x.sin() * 3)

    program = both(module, [torch.randn(4, 5)], device if place == "device" else "cpu", fusions=fusions)
    assert program.arena is None or program.report().plan.arena_bytes


@pytest.mark.parametrize("function", [strided, strided_of_a_part, strided_copy], ids=lambda f: f.__name__)
def test_as_strided_in_an_arena_of_torch_compile(function):
    x = torch.randn(4, 5)

    def module(x):
        return function(x.sin() * 3)

    torch._dynamo.reset()
    found = torch.compile(module, backend="metalcore", options={"memory": "arena", "fallback": False})(x)
    agree(module(x), found)


@pytest.mark.lenient
def test_as_strided_in_a_replay(device):
    def function(x):
        y = metalcore.softmax(x, -1)
        z = torch.as_strided_copy(y, (2, 2), (1, 2), 2)
        return metalcore.softmax(z.exp() + y[:2, :2], -1)

    x = torch.randn(4, 5, device=device)
    replay = metalcore.capture(function, x, segments=True)
    agree(function(x), replay(x))
