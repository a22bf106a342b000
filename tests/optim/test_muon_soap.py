"""Muon and SOAP: against torch.optim.Muon, against one block after the other, and their states."""

import copy

import pytest
import torch
from adamw_cases import random_values

import metalcore
from metalcore._core.registry import OPS
from metalcore.optim.soap import Blocks

# Two of one shape, its transpose, an odd one.
SHAPES = ((24, 40), (24, 40), (40, 24), (7, 5))
_SOAP = {"lr": 0.05, "max_precond_dim": 16, "precondition_frequency": 2}


def pair(ours, theirs, device, dtype=torch.float32, shapes=SHAPES, at="cpu", **options):
    """Each optimizer with the same parameters."""
    made = []
    for optimizer, where in ((ours, device), (theirs, at)):
        params = [torch.nn.Parameter(v.to(where, dtype)) for v in random_values(*shapes)]
        made.append(optimizer(params, **options))
    return made


def params_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def step(*optimizers, seed, skip=()):
    for optimizer in optimizers:
        params = params_of(optimizer)
        for i, (p, grad) in enumerate(zip(params, random_values(*(p.shape for p in params), seed=seed))):
            p.grad = None if i in skip else grad.to(p)
        optimizer.step()


def assert_close(one, other, tolerance):
    for p, q in zip(params_of(one), params_of(other)):
        torch.testing.assert_close(p.detach().cpu(), q.detach().cpu(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "options",
    [{}, {"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3, "ns_steps": 2}],
    ids=str,
)
def test_muon_is_torchs(device, options):
    """The iterations are in bfloat16, whose rounding errors a learning rate of 0.01 makes small."""
    ours, theirs = pair(metalcore.optim.Muon, torch.optim.Muon, device, lr=0.01, **options)
    for seed in range(4):
        step(ours, theirs, seed=seed, skip=(1,) if seed == 2 else ())
    assert_close(ours, theirs, 4e-3)
    saved = copy.deepcopy(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(saved)
    step(ours, theirs, seed=9)
    assert_close(ours, theirs, 5e-3)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_muon_in_16_bits(device, dtype):
    ours, theirs = pair(metalcore.optim.Muon, torch.optim.Muon, device, dtype, lr=0.01)
    params_of(ours)[0].data = params_of(ours)[0].data.mT.contiguous().mT  # other strides
    for seed in range(2):
        step(ours, theirs, seed=seed)
    assert_close(ours, theirs, 2e-2)


def test_muon_on_the_cpu_and_overridden(device):
    ours, theirs = pair(metalcore.optim.Muon, torch.optim.Muon, "cpu", torch.float64, lr=0.01)
    step(ours, theirs, seed=0)
    assert_close(ours, theirs, 0)
    with metalcore.enable_pytorch_overrides("muon", "sgd"):
        ours, _ = pair(torch.optim.Muon, torch.optim.Muon, device)
        sgd, _ = pair(torch.optim.SGD, torch.optim.SGD, device, momentum=0.9)
        step(ours, sgd, seed=0)
        ran = {row.what: row.ran for row in metalcore.report().rows}
    assert type(ours) is torch.optim.Muon and type(sgd) is torch.optim.SGD
    assert ran["torch.optim.Muon"] == ran["torch.optim.SGD"] == 1


def test_muon_errors(device):
    with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
        metalcore.optim.Muon([torch.nn.Parameter(torch.zeros(3, device=device))])
    for options, text in (({"ns_steps": 100}, "must be less than 100"), ({"ns_coefficients": (1, 2)}, "exactly 3")):
        ours, _ = pair(metalcore.optim.Muon, metalcore.optim.Muon, device, shapes=((3, 3),), **options)
        with pytest.raises(ValueError, match=text):
            step(ours, seed=0)


@pytest.mark.parametrize("shape", ((5, 7), (16, 16), (17, 16), (33, 4, 5), (100, 2), (1, 50)), ids=str)
def test_blocks(shape):
    (value,) = random_values(shape)
    blocks = Blocks(value.shape, 16)
    parts = blocks.split(value)
    assert parts.shape == (blocks.count, *blocks.shape) and max(blocks.shape) <= 16
    assert torch.equal(blocks.join(parts, value), value)
    torch.testing.assert_close(parts.square().sum(), value.square().sum())


# Square blocks, whose first gradients have definite eigenbases; one of them is filled with zeros.
BLOCKS = ((16, 16), (32, 16), (16, 16), (9, 3, 3), (6,), ())


@pytest.mark.parametrize("options", ({}, {"weight_decay": 0.1, "maximize": True, "shampoo_beta": 0.8}), ids=str)
def test_soap_is_one_block_after_the_other(device, options):
    ours, theirs = pair(metalcore.optim.SOAP, OPS["soap"].reference, device, shapes=BLOCKS, **{**_SOAP, **options})
    for p in params_of(theirs):
        p.data = p.data.double()
    for seed in range(5):
        step(ours, theirs, seed=seed, skip=(2,) if seed == 1 else ())
        for p in params_of(ours):
            assert p.isfinite().all()
    for p, q in zip(params_of(ours), params_of(theirs)):
        # Quotients by means that happen to be near zero amplify the rounding errors of single elements.
        assert (p.detach().cpu().double() - q.detach()).norm() < 1e-3 * q.detach().norm()


def test_soaps_bases_are_those_of_its_means(device):
    """After many renewals with one kind of gradient, Pᵀ L P is diagonal, in descending order."""
    (p,) = (torch.nn.Parameter(v.to(device)) for v in random_values((12, 12)))
    made = metalcore.optim.SOAP([p], precondition_frequency=1, betas=(0.9, 0.9))
    for seed in range(30):
        p.grad = torch.diag(torch.arange(12.0, 0, -1)).to(device) @ random_values((12, 12), seed=seed)[0].to(device)
        made.step()
    basis, mean = made.state[p]["basis_left"][0].cpu(), made.state[p]["mean_left"][0].cpu()
    torch.testing.assert_close(basis.mT @ basis, torch.eye(12), rtol=0, atol=1e-5)
    rotated = basis.mT @ mean @ basis
    off = rotated - torch.diag(rotated.diagonal())
    assert off.norm() < 0.2 * rotated.norm() and rotated[0, 0] > 4 * rotated[6, 6]


def test_soap_lowers_a_loss(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 24), torch.nn.Tanh(), torch.nn.Linear(24, 3)).to(device)
    x, target = torch.randn(64, 20).to(device), torch.randn(64, 3).to(device)
    made = metalcore.optim.SOAP(model.parameters(), lr=0.01, max_precond_dim=16, precondition_frequency=3)

    def closure():
        made.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        return loss

    losses = [made.step(closure).item() for _ in range(40)]
    assert losses[-1] < 0.4 * losses[0]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_soap_goes_on_after_a_checkpoint(device, dtype):
    one, other = pair(metalcore.optim.SOAP, metalcore.optim.SOAP, device, dtype, BLOCKS, device, **_SOAP)
    for seed in range(6):
        if seed == 3:
            saved = copy.deepcopy(other.state_dict())
            other = metalcore.optim.SOAP(params_of(other), lr=1.0)
            other.load_state_dict(saved)
        step(one, other, seed=seed)
    assert_close(one, other, 0)
    floats = {entry.dtype for state in one.state.values() for entry in state.values()}
    assert floats == {torch.float32}
    assert copy.deepcopy(one).param_groups[0]["lr"] == 0.05


def test_soap_errors(device):
    p = torch.nn.Parameter(torch.zeros(3, 3, device=device))
    for options, text in (
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"lr": float("nan")}, "Invalid learning rate: nan"),
        ({"betas": (0.9, 1.0)}, r"Invalid betas\[1\]: 1.0"),
        ({"precondition_frequency": 0}, "precondition_frequency must be an integer of at least 1, not 0"),
        ({"max_precond_dim": 1.5}, "max_precond_dim must be an integer of at least 1, not 1.5"),
    ):
        with pytest.raises(ValueError, match=text):
            metalcore.optim.SOAP([p], **options)
    p = torch.nn.Parameter(torch.zeros(3, 3))
    p.grad = torch.zeros(3, 3).to_sparse()
    with pytest.raises(RuntimeError, match="SOAP does not support sparse gradients"):
        metalcore.optim.SOAP([p]).step()
