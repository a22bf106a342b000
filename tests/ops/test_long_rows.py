"""Long rows. Those of 2^31 elements and more go to PyTorch's op, since kernels cannot count so many: these tensors
have no memory, for they are expanded from one element, or empty. The error of sums does not grow with the length of
rows, in any plan: they have up to 2^24 elements, and there are many rows.

Elements of sums are between 0.5 and 1.5, so that sums grow, or all alike, so that each addition rounds in the same
direction. A bound is some roundings of float32, whatever the length.
"""

import pytest
import torch
import torch.nn.functional as F
from rows import tuned

import metalcore

LONG = 2**31


class Asked(Exception):
    pass


@pytest.fixture
def torchs(monkeypatch):
    """PyTorch's ops raise Asked, since they would need the memory."""

    def refuse(*args, **kwargs):
        raise Asked

    for where, name in ((torch, "softmax"), (torch, "log_softmax"), (F, "rms_norm")):
        monkeypatch.setattr(where, name, refuse)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize(
    "shape, dim",
    [
        ((LONG,), 0),
        ((LONG,), -1),
        ((1, LONG), 1),
        ((LONG, 1), 0),
        ((LONG, 4), 0),
        ((2, 2 * LONG), -1),
        ((2 * LONG, 2), -1),
    ],
)
def test_too_long_softmax(device, torchs, name, shape, dim):
    for dtype in (None, torch.float32):
        x = torch.zeros(1, dtype=torch.float16, device=device).expand(shape)  # .half() would allocate all of it
        with pytest.raises(Asked):
            getattr(metalcore, name)(x, dim, dtype=dtype)


@pytest.mark.parametrize("shape, dims", [((LONG,), 1), ((1, LONG), 1), ((2**16, 2**15), 2), ((2 * LONG, 2), 1)])
def test_too_long_rms_norm(device, torchs, shape, dims):
    x = torch.zeros(1, device=device).expand(shape)
    with pytest.raises(Asked):
        metalcore.rms_norm(x, shape[-dims:])


def test_add_rms_norm(device, torchs, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "__add__", lambda a, b: a)  # a sum would need the memory
    x = torch.zeros(1, device=device).expand(LONG)
    with pytest.raises(Asked):
        metalcore.add_rms_norm(x, x)


@pytest.mark.parametrize("shape", [(0, LONG), (0, 3, LONG)])
def test_no_rows_of_that_length(device, shape):
    x = torch.empty(shape, device=device)
    assert metalcore.softmax(x, -1).shape == shape and metalcore.log_softmax(x, -1).shape == shape
    assert metalcore.rms_norm(x, (LONG,)).shape == shape


@pytest.mark.only_on("simulator", "cuda")
@pytest.mark.parametrize("dtype, text", [(torch.float32, "float32"), (torch.bfloat16, "bfloat16")])
def test_out_of_memory_says_how_much_and_where(device, dtype, text):
    x = torch.zeros(1, device=device, dtype=dtype).expand(2**20, 2**24)
    size = 2**44 * x.element_size() / 2**30
    for call in (lambda: metalcore.softmax(x, -1), lambda: metalcore.rms_norm(x, (2**24,))):
        with pytest.raises(RuntimeError) as error:
            call()
        message = str(error.value)
        assert "out of memory." in message and f"{size:.2f} GiB on {device}:0" in message
        assert f"[{2**20}, {2**24}] and dtype {text}" in message


EPS = torch.finfo(torch.float32).eps
each_plan = pytest.mark.parametrize("family", ["simulator", "baseline"])
# At the second length a thread adds several blocks of 128 terms, in plans with one threadgroup a row too.
each_length = pytest.mark.parametrize("length", [2**12, 2**20])


def numbers(kind, *shape):
    return torch.rand(shape) + 0.5 if kind == "random" else torch.full(shape, 0.7)


# A thread adds blocks of 128 terms. Where these are alike, each of their additions rounds in the same direction, by
# half of a float32's last place, while the sum is half of what it becomes on average. Gradients have two such sums.
ROUNDINGS = {"random": 8, "alike": 8 + 2 * 128 // 4}


def compare(family, function, reference, tensors, device, *, roundings=8):
    """Compares results and gradients in their norms."""
    made = []
    for call, where, dtype in ((function, device, torch.float32), (reference, "cpu", torch.float64)):
        given = [tensor.to(where, dtype).requires_grad_() for tensor in tensors]
        with tuned(family if where == device else "simulator"):
            result = call(*given)
            weights = torch.linspace(0.5, 1, result.numel(), dtype=torch.float64).to(where, dtype).view(result.shape)
            made.append([result.detach(), *torch.autograd.grad(result, given, weights)])
    for ours, expected in zip(*made, strict=True):
        error = (ours.cpu().double() - expected).norm()
        assert error <= roundings * EPS * expected.norm(), f"{error / expected.norm() / EPS:.1f} roundings"


def with_dim(op, **options):
    return lambda x: op(x, -1, **options)


@each_plan
@each_length
def test_rms_norm(device, family, length):
    for kind in ("random", "alike"):
        x, weight = numbers(kind, 1, length), numbers("random", length)
        compare(
            family,
            lambda x, w: metalcore.rms_norm(x, (length,), w, 1e-6),
            lambda x, w: F.rms_norm(x, (length,), w, 1e-6),
            [x, weight],
            device,
            roundings=ROUNDINGS[kind],
        )


@each_plan
@each_length
def test_layer_norm(device, family, length):
    tensors = numbers("random", 1, length), numbers("random", length), numbers("random", length)
    shape = (length,)
    compare(
        family,
        lambda *t: metalcore.layer_norm(t[0], shape, *t[1:]),
        lambda *t: F.layer_norm(t[0], shape, *t[1:]),
        tensors,
        device,
    )


@each_plan
@each_length
def test_gradients_of_parameters_over_many_rows(device, family, length):
    x, weight = numbers("random", length // 4, 4), numbers("random", 4)
    bias = numbers("random", 4)
    # A row of 4 has a variance that its elements' rounding changes.
    compare(
        family, lambda *t: metalcore.layer_norm(t[0], (4,), *t[1:]), lambda *t: F.layer_norm(t[0], (4,), *t[1:]),
        [x, weight, bias], device, roundings=256,
    )  # fmt: skip
    compare(
        family, lambda x, w: metalcore.rms_norm(x, (4,), w, 1e-6), lambda x, w: F.rms_norm(x, (4,), w, 1e-6),
        [x, weight], device,
    )  # fmt: skip


@each_plan
@each_length
def test_group_norm(device, family, length):
    x, bias = numbers("random", 2, 4, length // 4), numbers("random", 4)
    # Sums of normalized elements cancel: the weight's gradient is left out. PyTorch's backward needs a weight. The
    # input's gradient is that of the result less its mean in the group, a fifteenth of it, and neighbours are alike.
    ones = torch.ones(4)
    compare(
        family,
        lambda x, b: metalcore.group_norm(x, 2, ones.to(device), b),
        lambda x, b: F.group_norm(x, 2, ones.double(), b),
        [x, bias],
        device,
        roundings=1024,
    )


@each_plan
@each_length
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax(device, family, length, name):
    ours, theirs = getattr(metalcore, name), getattr(torch, name)
    # log_softmax saves its result, a number of ln(length), whose rounding the gradient has.
    for kind, roundings in ROUNDINGS.items():
        roundings += 0 if name == "softmax" else 32
        row = numbers(kind, 1, length)
        compare(family, with_dim(ours), with_dim(theirs), [row], device, roundings=roundings)
        columns = numbers(kind, length // 4, 4)
        compare(family, lambda x: ours(x, 0), lambda x: theirs(x, 0), [columns], device, roundings=roundings)


@each_plan
@each_length
@pytest.mark.parametrize("smoothing", [0.0, 0.3, 1.0])
def test_cross_entropy(device, family, length, smoothing):
    for kind, roundings in ROUNDINGS.items():
        if smoothing == 1 and kind == "alike":
            continue  # the gradient is 0
        x, target = numbers(kind, 1, length), torch.tensor([length // 3])
        compare(
            family,
            lambda x: metalcore.cross_entropy(x, target.to(device), label_smoothing=smoothing),
            lambda x: F.cross_entropy(x, target, label_smoothing=smoothing),
            [x],
            device,
            roundings=roundings,
        )


@each_plan
@each_length
def test_losses_of_many_rows(device, family, length):
    x, target = numbers("random", length // 4, 4), torch.arange(length // 4) % 4
    weight = torch.tensor([0.5, 0.7, 1.1, 1.3])
    compare(
        family,
        lambda x: metalcore.cross_entropy(x, target.to(device), weight.to(device)),
        lambda x: F.cross_entropy(x, target, weight.to(x.dtype)),
        [x],
        device,
    )


@each_plan
@each_length
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_divergences(device, family, length, beta):
    x, y = (numbers("random", 1, length).log_softmax(-1) for _ in range(2))

    def reference(x):
        p, log_p = y.to(x.dtype).exp(), y.to(x.dtype)
        if not beta:
            return (p * (log_p - x)).sum()
        log_q = x.log_softmax(-1)
        log_m = ((p + log_q.exp()) / 2).log()
        return ((p * (log_p - log_m)).sum() + (log_q.exp() * (log_q - log_m)).sum()) / 2

    def function(x):
        if not beta:
            return metalcore.kl_div(x, y.to(x.device), reduction="sum", log_target=True)
        return metalcore.jsd(x, y.to(x.device), beta, reduction="sum")

    # Differences of logarithms of about ln(length) have that number's roundings, and a divergence is small beside its
    # terms, whose errors do not depend on the length otherwise.
    compare(family, function, reference, [x], device, roundings=1024)


@each_plan
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "log_softmax", "cross_entropy"])
def test_the_longest_rows(device, family, name):
    length = 2**24 + 4  # float32 has no odd numbers above 2^24
    x = numbers("random", 1, length)
    target = torch.zeros(1, dtype=torch.int64, device=device)
    calls = {
        "rms_norm": lambda x: metalcore.rms_norm(x, (length,)),
        "layer_norm": lambda x: metalcore.layer_norm(x, (length,)),
        "log_softmax": lambda x: metalcore.log_softmax(x, -1),
        "cross_entropy": lambda x: metalcore.cross_entropy(x, target, label_smoothing=0.3),
    }
    with tuned(family), torch.no_grad():
        found = calls[name](x.to(device)).cpu()
    whole = x.double()
    exact = {
        "rms_norm": lambda: whole[:, :1000] * (whole.square().mean() + torch.finfo(torch.float32).eps).rsqrt(),
        "layer_norm": lambda: (whole[:, :1000] - whole.mean()) * (whole.var(correction=0) + 1e-5).rsqrt(),
        "log_softmax": lambda: whole[:, :1000] - whole.logsumexp(-1),
        "cross_entropy": lambda: whole.logsumexp(-1)[0] - 0.7 * whole[0, 0] - 0.3 * whole.mean(),
    }[name]()
    part = found[:, :1000].double() if found.dim() else found.double()
    error = (part - exact).norm() / exact.norm()
    assert error <= 4 * EPS, f"{error / EPS:.1f} roundings"
