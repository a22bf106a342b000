"""The override of torch.optim.AdamW's constructor: which calls make metalcore's optimizer, and what its state is."""

import copy

import pytest
import torch

import metalcore


def made(device):
    return [torch.nn.Parameter(torch.randn(4, 3, device=device)), torch.nn.Parameter(torch.randn(5, device=device))]


def train(device):
    torch.manual_seed(0)
    parameters = made(device)
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return optimizer, [parameter.detach() for parameter in parameters]


def test_construction(device):
    _, expected = train(device)
    with metalcore.enable_pytorch_overrides("adamw"):
        optimizer, found = train(device)
    assert isinstance(optimizer, metalcore.optim.AdamW)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert type(train(device)[0]) is torch.optim.AdamW


def test_forms_of_parameters(device):
    with metalcore.enable_pytorch_overrides("adamw"):
        for make in (
            lambda: iter(made(device)),
            lambda: torch.nn.Linear(2, 3, device=device).named_parameters(),
            lambda: [{"params": iter(made(device)), "lr": 0.5}, {"params": made(device)[0]}],
        ):
            optimizer = torch.optim.AdamW(make(), fused=True)
            assert isinstance(optimizer, metalcore.optim.AdamW)
            assert all(group["params"] for group in optimizer.param_groups)


# Only the fused step is tested in float16: there PyTorch's other steps divide by an eps of zero.
@pytest.mark.parametrize(
    "dtype, options",
    ((torch.bfloat16, {}), (torch.bfloat16, {"amsgrad": True}), (torch.float16, {"fused": True})),
    ids=str,
)
def test_the_state_has_pytorchs_dtypes(device, dtype, options):
    def train():
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(300, device=device).to(dtype))
        optimizer = torch.optim.AdamW([parameter], lr=0.1, **options)
        for _ in range(3):
            parameter.grad = torch.randn(300, device=device).to(dtype)
            optimizer.step()
        return optimizer, parameter

    theirs, expected = train()
    with metalcore.enable_pytorch_overrides("adamw"):
        ours, found = train()
        again = copy.deepcopy(ours)
        again.load_state_dict(theirs.state_dict())
        again.step()
    state, expected_state = ours.state[found], theirs.state[expected]
    assert isinstance(ours, metalcore.optim.AdamW)
    assert {name: x.dtype for name, x in state.items()} == {name: x.dtype for name, x in expected_state.items()}
    assert all(
        x.dtype in (dtype, torch.float32) and (x.dtype is dtype or x.numel() == 1)
        for state in again.state.values()
        for x in state.values()
    )
    # PyTorch's fused step rounds once, and its other steps round after each of some ten operations.
    bound = 10 * 3 * torch.finfo(dtype).eps * expected.abs().max().item()
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=0, atol=bound)


def test_left_alone(device):
    class Mine(torch.optim.AdamW):
        pass

    with metalcore.enable_pytorch_overrides("adamw"):
        assert type(torch.optim.AdamW(made("cpu"))) is torch.optim.AdamW
        assert type(Mine(made(device))) is Mine
        assert type(torch.optim.Adam(made(device))) is torch.optim.Adam
        for wrong in ([], [3], [{}], 5):
            with pytest.raises((ValueError, TypeError, KeyError)):
                torch.optim.AdamW(wrong)
        with pytest.raises(ValueError, match="learning rate"):
            torch.optim.AdamW(made(device), lr=-1.0)
