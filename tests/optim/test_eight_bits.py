"""Optimizers whose states have 8 bits: the kernel against the same steps by PyTorch's ops, and against 32 bits."""

import copy

import pytest
import torch

import metalcore
from metalcore.optim import SGD, AdamW, AdamW8bit, AdamWFp8, Lion, Lion8bit, SGD8bit
from metalcore.quant._blockwise import dynamic_code, unpack_blocks

CLASSES = {AdamW8bit: AdamW, AdamWFp8: AdamW, Lion8bit: Lion, SGD8bit: SGD}
each_class = pytest.mark.parametrize("optimizer", CLASSES, ids=lambda cls: cls.__name__)
SHAPES = ((70, 60), (5,), (4099,), (2, 64, 33), (0, 4))


def parameters(device, dtype, shapes=SHAPES):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape).to(dtype).to(device)) for shape in shapes]
    params.append(torch.nn.Parameter(torch.randn(80, 64).to(dtype).to(device).T))  # dense, in another order
    return params


def train(cls, params, steps=4, **options):
    optimizer = cls(params, lr=0.01, **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype).to(p.device)
        optimizer.step()
    return optimizer


@each_class
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_as_by_torch(device, optimizer, dtype):
    """A state near the middle between two entries may become either, which changes later steps by a step of the table:
    few elements differ by more than roundings."""
    ours, theirs = parameters(device, dtype), parameters("cpu", dtype)
    theirs[-1] = torch.nn.Parameter(theirs[-1].detach().T.contiguous().T)
    states, expected = train(optimizer, ours), train(optimizer, theirs)
    for p, q in zip(ours, theirs):
        error = (p.detach().cpu().float() - q.detach().float()).abs()
        bound = 4 * torch.finfo(dtype).eps * (q.detach().float().abs() + 0.01)
        assert (error > bound).sum() <= 1 + q.numel() // 1000
        if q.numel() >= 4096 and q.is_contiguous():
            first, second = states.state[p], expected.state[q]
            assert torch.allclose(first["absmax1"].cpu(), second["absmax1"], rtol=1e-5)
            wrong = first["state1"].cpu().int() - second["state1"].int()
            assert wrong.abs().max() <= 1 and wrong.ne(0).sum() <= 1 + q.numel() // 1000
    assert states.state[ours[1]]["state1"].dtype is torch.float32  # too small
    size = sum(t.numel() * t.element_size() for k, t in states.state[ours[0]].items() if k[:3] in ("sta", "abs"))
    assert size <= 1.05 * 4200 * len(states.NAMES)


@each_class
def test_near_32_bits(device, optimizer):
    """Two hundred steps towards a minimum end as near to it as with states in 32 bits."""
    target = torch.randn(64, 80, device=device)
    losses = []
    for cls in (optimizer, CLASSES[optimizer]):
        p = torch.nn.Parameter(torch.zeros_like(target))
        options = {"momentum": 0.9} if cls is SGD else {}
        lr = 0.1 if "SGD" in cls.__name__ else 0.02
        steps = cls([p], lr=lr, weight_decay=0.0, **options)
        for _ in range(200):
            p.grad = p.detach() - target
            steps.step()
        losses.append((p.detach() - target).square().mean().item())
    assert losses[0] < max(2 * losses[1], 1e-3)


@each_class
def test_state_dicts(device, optimizer):
    """Training goes on from a saved state as without the break, and moves between devices."""
    params = parameters(device, torch.bfloat16)
    states = train(optimizer, params)
    saved = copy.deepcopy(states.state_dict())
    assert saved["state"][0].keys() == {"step", "__bnb_optimizer_quant_state__"}
    again = [torch.nn.Parameter(p.detach().clone()) for p in params]
    loaded = optimizer(again, lr=0.01)
    loaded.load_state_dict(saved)
    for p, q in zip(params, again):
        p.grad = torch.ones_like(p)
        q.grad = torch.ones_like(q)
    states.step()
    loaded.step()
    assert all(torch.equal(p, q) for p, q in zip(params, again))
    assert loaded.state[again[1]]["state1"].dtype is torch.float32


def test_scales_and_nan(device):
    p = torch.nn.Parameter(torch.zeros(4096, device=device))
    p.grad = torch.zeros_like(p)
    p.grad[300], p.grad[700] = 2.0, torch.nan
    optimizer = SGD8bit([p], lr=1.0)
    optimizer.step()
    assert p[300] == -2 and p[700].isnan() and p.isnan().sum() == 1
    absmax = optimizer.state[p]["absmax1"]
    assert absmax[0] == 0 and absmax[1] == 2 and absmax[2].isnan() and absmax[3:].eq(0).all()
    code = dynamic_code(torch.device("cpu"))
    momentum = unpack_blocks(optimizer.state[p]["state1"].cpu(), absmax.cpu(), "code", 256, code, (4096,))
    assert momentum[300] == 2 and momentum[:300].eq(0).all()


def test_numbers_of_fp8(device):
    """What states stand for is what torchao's states of the first step are."""
    quantize_fp8 = pytest.importorskip("torchao.optim.subclass_fp8").quantize_fp8
    p = torch.nn.Parameter(torch.zeros(64, 80, device=device))
    grad = torch.randn(64, 80) * torch.logspace(-6, 3, 64)[:, None]
    p.grad = grad.to(device)
    optimizer = AdamWFp8([p], betas=(0.5, 0.5))
    optimizer.step()
    for name, exact in (("1", 0.5 * grad), ("2", 0.5 * grad * grad)):
        packed, scales, table = (optimizer.state[p][key + name].cpu() for key in ("state", "absmax", "qmap"))
        found = unpack_blocks(packed, scales, "code", 256, table, p.shape)
        codes, scale = quantize_fp8(exact, 256)
        expected = (codes.float().view(-1, 256) * scale[:, None]).view(p.shape)
        # A number in the middle between two may become either. Scales are rounded once, in other places.
        near = (found - expected).abs() <= 2**-22 * expected.abs()
        assert (~near).sum() <= 5 and ((found - expected).abs() <= expected.abs() / 8 + 2**-17 * scales.max()).all()


def test_errors(device):
    p = torch.nn.Parameter(torch.ones(4, device=device))
    with pytest.raises(ValueError, match="SGD8bit: momentum must be between 0 and 1, not 0"):
        SGD8bit([p], momentum=0)
    with pytest.raises(ValueError, match="AdamW8bit: lr must not be negative, and is -1"):
        AdamW8bit([p], lr=-1)
    with pytest.raises(ValueError, match="Lion8bit: betas must be two numbers in"):
        Lion8bit([p], betas=(0.9, 1.0))
    with pytest.raises(TypeError, match="min_8bit_size must be an integer"):
        AdamW8bit([p], min_8bit_size=0.5)  # pyright: ignore[reportArgumentType]
    x = torch.ones(256, device=device)
    bytes_of, scale, code = x.to(torch.uint8), x[:1], x.clone()
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "eps": 0.0, "weight_decay": 0.0, "grad_scale": 1.0, "step": 1}
    update = metalcore._core.operators.ops.update_8bit_
    with pytest.raises(RuntimeError, match='algorithm must be "adam", "lion" or "momentum", not "sgd"'):
        update([x], [x], [bytes_of], [], [scale], [], code, None, "sgd", **numbers)
    with pytest.raises(RuntimeError, match="absmax1 must be float32, dense, with 1 elements"):
        update([x], [x], [bytes_of], [], [x], [], code, None, "lion", **numbers)
    with pytest.raises(RuntimeError, match="each parameter has one state1"):
        update([x], [x], [bytes_of], [], [scale], [], code, code, "adam", **numbers)
