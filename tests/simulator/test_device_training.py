"""Training on the simulated device gives the CPU's numbers, bit by bit."""

import pytest
import torch
from torch import nn

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw_amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adam_tensor_lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


def train(device, make_optimizer, dtype=torch.float32, steps=4):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)).to(device, dtype)
    optimizer = make_optimizer(model.parameters())
    torch.manual_seed(1)
    inputs = torch.randn(steps, 8, 16).to(device, dtype)
    labels = torch.randint(0, 4, (steps, 8)).to(device)
    losses = []
    for x, label in zip(inputs, labels):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), label)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses), *(parameter.detach().cpu() for parameter in model.parameters())


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers(make_optimizer):
    for actual, expected in zip(train("mps", make_optimizer), train("cpu", make_optimizer), strict=True):
        assert torch.equal(actual, expected)


def test_bfloat16():
    for actual, expected in zip(
        train("mps", OPTIMIZERS["adamw"], torch.bfloat16),
        train("cpu", OPTIMIZERS["adamw"], torch.bfloat16),
        strict=True,
    ):
        assert torch.equal(actual, expected)


MODULES = {
    "conv": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
        (2, 3, 8, 8),
    ),
    "conv_transpose": (lambda: nn.ConvTranspose1d(3, 4, 3), (2, 3, 8)),
    "lstm": (lambda: nn.LSTM(4, 5, batch_first=True), (2, 6, 4)),
    "gru": (lambda: nn.GRU(4, 5), (6, 2, 4)),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (2, 5, 8)),
    "group_norm": (lambda: nn.GroupNorm(2, 4), (3, 4, 5)),
}


@pytest.mark.parametrize("make, shape", MODULES.values(), ids=MODULES)
def test_modules(make, shape):
    results = []
    for device in ("cpu", "mps"):
        torch.manual_seed(0)
        module = make()
        x = torch.randn(shape).to(device).requires_grad_()
        module.to(device)
        output = module(x)
        output = output[0] if isinstance(output, tuple) else output
        output.sin().sum().backward()
        results.append([output.detach(), x.grad, *(parameter.grad for parameter in module.parameters())])
    for expected, actual in zip(*results, strict=True):
        # Attention is PyTorch's composite here and its fused kernel on the CPU: sums of at most 16 terms differ.
        scale = expected.abs().max().clamp(min=1).item()
        torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=64 * torch.finfo(torch.float32).eps * scale)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"is_causal": True},
        {"attn_mask": torch.ones(9, 9, dtype=torch.bool).tril()},
        {"attn_mask": torch.linspace(-1, 1, 81).view(9, 9)},
    ],
    ids=["plain", "causal", "boolean mask", "bias"],
)
def test_attention_equals_the_cpus_composite(arguments):
    results = []
    for device in ("cpu", "mps"):
        torch.manual_seed(0)
        query, key, value = (torch.randn(2, 4, 9, 16).to(device).requires_grad_() for _ in range(3))
        moved = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            output = nn.functional.scaled_dot_product_attention(query, key, value, **moved)
        output.sin().sum().backward()
        results.append([output.detach(), query.grad, key.grad, value.grad])
    for expected, actual in zip(*results, strict=True):
        assert torch.equal(actual.cpu(), expected)


ROWS = torch.ones(1, 3, 4)
REFUSED = {
    "a query of another dtype": (ROWS, ROWS.half(), ROWS.half()),
    "values of another dtype": (ROWS, ROWS, ROWS.half()),
    "a mask of integers": (ROWS, ROWS, ROWS, torch.ones(3, 3).long()),
    "a mask of float16": (ROWS, ROWS, ROWS, torch.ones(3, 3).half()),
    "a query without rows": (ROWS[0, 0], ROWS, ROWS),
}


@pytest.mark.parametrize("inputs", REFUSED.values(), ids=REFUSED)
def test_attention_refuses_what_a_mac_refuses(inputs):
    with pytest.raises(RuntimeError) as expected:
        nn.functional.scaled_dot_product_attention(*inputs)
    with pytest.raises(RuntimeError) as found:
        nn.functional.scaled_dot_product_attention(*(x.to("mps") for x in inputs))
    assert str(found.value) == str(expected.value)


def test_autocast_and_grad_scaler():
    model = nn.Linear(8, 8).to("mps")
    x = torch.randn(2, 8, device="mps")
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("mps", dtype=dtype):
            y = model(x)
            assert y.dtype == dtype
        y.float().sum().backward()
        assert model.weight.grad.dtype == torch.float32
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("mps", init_scale=1024.0, growth_interval=1)
    before = model.weight.detach().clone()
    optimizer.zero_grad()
    scaler.scale(model(x).sum()).backward()
    scaler.unscale_(optimizer)
    expected = before - 0.1 * model.weight.grad
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2048.0
    torch.testing.assert_close(model.weight.detach(), expected)
    model.weight.grad.fill_(torch.inf)
    before = model.weight.detach().clone()
    scaler.scale(model(x).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1024.0 and torch.equal(model.weight, before)


def test_checkpointing_and_hooks():
    from torch.utils.checkpoint import checkpoint

    model = nn.Linear(4, 4).to("mps")
    seen = []
    model.register_full_backward_hook(lambda module, into, out: seen.append(out[0].device.type))
    for reentrant in (False, True):
        x = torch.randn(2, 4, device="mps", requires_grad=True)
        checkpoint(lambda t: nn.functional.dropout(model(t)), x, use_reentrant=reentrant).sum().backward()
        assert x.grad.is_mps
    assert seen and set(seen) == {"mps"}


def test_several_threads_train_at_once():
    from concurrent.futures import ThreadPoolExecutor

    def gradient(seed):
        x = torch.full((16, 16), float(seed), device="mps", requires_grad=True)
        for _ in range(20):
            x.grad = None
            (x @ x.t()).sum().backward()
        return x.grad.cpu()

    with ThreadPoolExecutor(4) as pool:
        for seed, result in enumerate(pool.map(gradient, range(4))):
            assert torch.equal(result, torch.full((16, 16), 32.0 * seed))
