"""What programs join to generated kernels, and what they leave to PyTorch."""

import torch
import torch.nn.functional as F
from checks import Calls, agree, operators
from torch import nn

import metalcore


def operators_of(function, *tensors):
    """The names of a program's operations, whose results agree with PyTorch's."""
    program = metalcore.compile(Calls(function), tensors)
    agree(function(*tensors), program(*tensors))
    return [name for name, step in zip(operators(program), program.report().steps) if step.place != "view"]


def test_windows_and_parts_join_what_comes_before(device):
    torch.manual_seed(0)
    x, r = torch.randn(2, 4, 6, 6).to(device), torch.randn(2, 4, 3, 3).to(device)
    assert operators_of(lambda x, r: F.max_pool2d((x * 2).relu(), 3, 2, 1) + r, x, r) == ["mul+relu+max_pool2d+add"]
    assert operators_of(lambda x: F.pad(x.exp(), (1, 1))[..., ::2] * 2, x) == ["exp+pad+slice+mul"]
    # Each element would be computed nine times.
    assert operators_of(lambda x: F.avg_pool2d(x.exp(), 3, 1, 1).sin(), x) == ["exp", "avg_pool2d+sin"]
    # Somebody else reads what is cut.
    assert operators_of(lambda x: (y := x.exp(), y[:, 1:].flip(1)), x) == ["exp", "flip"]


def test_views_join_what_they_are_between_alone(device):
    torch.manual_seed(0)
    x, i = torch.randn(4, 6).to(device), torch.tensor([3, 0]).to(device)
    assert operators_of(lambda x, i: (x.exp().view(2, 12).t() + 1).reshape(-1), x, i) == ["exp+view+t+add+reshape"]
    assert operators_of(lambda x, i: x.view(2, 12)[:, i], x, i) == ["index"]
    assert operators_of(lambda x, i: torch.cat([x, x]), x, i) == ["cat"]
    assert operators_of(lambda x, i: x.index_copy(0, i, x[2:] * 2) + 1, x, i) == ["mul+index_copy+add"]
    assert operators_of(lambda x, i: F.embedding(i, x * 2), x, i) == ["mul+embedding"]


def test_readers_of_one_tensor_join(device):
    torch.manual_seed(0)
    x, y = torch.randn(2, 4, 6).to(device)
    assert operators_of(lambda x, y: (x * y + 1, torch.exp(-(x * x))), x, y) == ["mul+add+mul+neg+exp"]
    assert operators_of(lambda x, y: (x.exp(), x.sin()), x, y) == ["exp+sin"]
    # One depends on the other through a product of matrices, or is needed before all that the other reads.
    assert operators_of(lambda x, y: x.sin() * ((x.exp() @ y.mT) @ y), x, y).count("matmul") == 2
    found = operators_of(lambda x, y: (z := x.exp() @ y.mT, x.sin() * (z @ y)), x, y)
    assert found == ["exp", "matmul", "matmul", "sin+mul"]
    # Nothing is saved where they read it at other places.
    assert operators_of(lambda x, y: (x.exp(), x.t().contiguous() * 2), x, y) == ["exp", "contiguous+mul"]


def test_operators_without_a_kernel_on_macs_are_generated_alone(device):
    program = metalcore.compile(Calls(torch.heaviside), (torch.randn(5).to(device), torch.ones(5).to(device)))
    assert [step.place for step in program.report().steps] == ["generated" if device == "mps" else "torch"]


def test_a_group_stays_behind_writes_to_what_it_reads(device):
    class Shifted(nn.Module):
        def forward(self, ids):
            shifted = ids.new_zeros(ids.shape)
            shifted[:, 1:] = ids[:, :-1].clone()
            shifted[:, 0] = 2
            return shifted.masked_fill(shifted == 5, 1)

    model, ids = Shifted(), torch.arange(12, device=device).reshape(2, 6)
    program = metalcore.compile(model, (ids,))
    assert program.report().count("generated")
    assert torch.equal(program(ids), model(ids))
