"""What cross_entropy and fused_linear_cross_entropy return besides the loss, and losses that are scaled by row."""

import pytest
import torch
import torch.nn.functional as F
from references import DTYPES, wide

import metalcore

EVERYTHING = {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}


def reference(
    logits,
    target,
    class_weight=None,
    reduction="mean",
    softcap=None,
    z_loss=0.0,
    token_weight=None,
    scaling=False,
    **rest,
):
    """Computes all results in float64 by the definitions of Liger-Kernel, but means divide by the targets' weights."""
    x = logits if softcap is None else softcap * (logits / softcap).tanh()
    counted = target != -100
    rows = F.cross_entropy(x, target, class_weight, reduction="none", **rest)
    squares = (z_loss * x.logsumexp(-1).square()).where(counted, 0.0)
    rows = rows + squares
    weights = counted.double() if class_weight is None else class_weight[target.where(counted, 0)] * counted
    if token_weight is not None:
        rows, squares, weights = rows * token_weight, squares * token_weight, weights * token_weight
    if scaling:
        p = x.detach().softmax(-1).gather(-1, target.where(counted, 0)[:, None])[:, 0] * counted
        rows, squares = rows * p, squares * p
    predicted = logits.argmax(-1).where(counted, -1)
    accuracy = (predicted == target).double() * counted
    if reduction != "none":
        total = weights.sum() if reduction == "mean" else 1.0
        rows, squares, accuracy = rows.sum() / total, squares.sum() / total, accuracy.sum() / counted.sum()
    return rows, squares.detach(), accuracy, predicted


def check(found, expected, leaves, wide_leaves, eps):
    loss, z_loss, accuracy, predicted = found
    assert isinstance(found, metalcore.loss.CrossEntropyOutput)
    assert not z_loss.requires_grad and accuracy.dtype == torch.float32 and predicted.dtype == torch.int64
    assert torch.equal(predicted.cpu(), expected[3].view(predicted.shape))
    torch.testing.assert_close(wide(accuracy), expected[2].view(accuracy.shape))
    torch.testing.assert_close(wide(z_loss), expected[1].view(z_loss.shape), rtol=4 * eps, atol=1e-6)
    grad = torch.linspace(0.5, 1, expected[0].numel(), dtype=torch.float64).view(expected[0].shape)
    ours = torch.autograd.grad(loss, leaves, grad.to(loss).view(loss.shape))
    theirs = torch.autograd.grad(expected[0], wide_leaves, grad)
    for value, wanted in zip((loss, *ours), (expected[0].view(loss.shape), *theirs), strict=True):
        scale = wanted.abs().max().clamp(min=1e-3)
        # Logits, losses and gradients are rounded to the dtype, and rows add.
        torch.testing.assert_close(wide(value) / scale, wanted.detach() / scale, rtol=0, atol=8 * eps)


OPTIONS = {
    "mean": {"z_loss": 0.01},
    "sum": {"reduction": "sum", "label_smoothing": 0.1},
    "none": {"reduction": "none", "softcap": 3.0, "z_loss": 0.01},
    "weights": {"class_weight": True, "z_loss": 0.01},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scaling", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_cross_entropy(device, dtype, name, scaling):
    torch.manual_seed(0)
    options = dict(OPTIONS[name])
    x, target = torch.randn(40, 30).to(dtype), torch.randint(30, (40,))
    target[:3] = -100
    target[5:20] = x[5:20].argmax(-1)
    weights = torch.rand(30).to(dtype) if options.pop("class_weight", False) else None
    ours, theirs = x.to(device).requires_grad_(), wide(x).requires_grad_()
    on_device = weights if weights is None else weights.to(device)
    found = metalcore.cross_entropy(ours, target.to(device), on_device, token_scaling=scaling, **options, **EVERYTHING)
    expected = reference(theirs, target, weights if weights is None else wide(weights), scaling=scaling, **options)
    check(found, expected, [ours], [theirs], torch.finfo(dtype).eps)
    if not scaling:
        assert torch.equal(found.loss, metalcore.cross_entropy(ours, target.to(device), on_device, **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scaling, weighted", [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("name", OPTIONS)
def test_fused(device, dtype, name, scaling, weighted):
    torch.manual_seed(0)
    options = dict(OPTIONS[name])
    hidden, weight, bias = torch.randn(2, 20, 8).to(dtype), torch.randn(30, 8).to(dtype), torch.randn(30).to(dtype)
    target = torch.randint(30, (2, 20))
    target[0, :3] = -100
    tokens = torch.rand(2, 20) + 0.5 if weighted else None
    if tokens is not None:
        tokens[0, 0] = torch.inf  # of an ignored target
    weights = torch.rand(30).to(dtype) if options.pop("class_weight", False) else None
    given = {"class_weight": weights, "token_weight": tokens}
    leaves = [leaf.to(device).requires_grad_() for leaf in (hidden, weight, bias)]
    h, w, b = wide_leaves = [wide(leaf).requires_grad_() for leaf in (hidden, weight, bias)]
    found = metalcore.fused_linear_cross_entropy(
        leaves[0],
        leaves[1],
        target.to(device),
        leaves[2],
        chunk=16,
        token_scaling=scaling,
        **{key: value if value is None else value.to(device) for key, value in given.items()},
        **options,
        **EVERYTHING,
    )
    logits = F.linear(h, w, b).flatten(0, 1)
    # The prediction is of the logits that the dtype holds.
    rounded = F.linear(*(leaf.detach() for leaf in leaves)).flatten(0, 1)
    expected = reference(
        logits,
        target.flatten(),
        weights if weights is None else wide(weights),
        token_weight=tokens if tokens is None else wide(tokens).flatten().where(target.flatten() != -100, 0.0),
        scaling=scaling,
        **options,
    )
    predicted = rounded.argmax(-1).cpu().where(target.flatten() != -100, -1)
    hits = (predicted == target.flatten()).double()
    hits = hits if options.get("reduction") == "none" else hits.sum() / (target != -100).sum()
    check(found, (*expected[:2], hits, predicted), leaves, wide_leaves, 2 * torch.finfo(dtype).eps)


def test_input_that_goes_to_pytorch(device):
    """float64, the CPU, and token weights with a gradient."""
    x, target = torch.randn(12, 7, dtype=torch.float64, requires_grad=True), torch.randint(7, (12,))
    target[2] = -100
    options = {"z_loss": 0.1, "softcap": 2.0}
    found = metalcore.cross_entropy(x, target, token_scaling=True, **options, **EVERYTHING)
    check(found, reference(x, target, scaling=True, **options), [x], [x], 1e-12)
    hidden, weight = torch.randn(12, 5, dtype=torch.float64), torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    tokens = torch.rand(12, dtype=torch.float64, requires_grad=True)
    found = metalcore.fused_linear_cross_entropy(hidden, weight, target, token_weight=tokens, **options, **EVERYTHING)
    expected = reference(hidden @ weight.T, target, token_weight=tokens, **options)
    torch.testing.assert_close(found.loss, expected[0])
    ours = [t.float().to(device).detach().requires_grad_() for t in (hidden, weight, tokens)]
    loss = metalcore.fused_linear_cross_entropy(*ours[:2], target.to(device), token_weight=ours[2], **options)
    for mine, theirs in zip(torch.autograd.grad(loss, ours[1:]), torch.autograd.grad(expected[0], (weight, tokens))):
        torch.testing.assert_close(wide(mine), theirs, rtol=1e-4, atol=1e-5)


def test_shapes_and_second_derivatives(device):
    x = torch.randn(2, 6, 3, 4, device=device)
    target = torch.randint(6, (2, 3, 4), device=device)
    found = metalcore.cross_entropy(x, target, reduction="none", **EVERYTHING)
    assert all(part.shape == target.shape for part in found)
    assert torch.equal(found.predicted_tokens, x.argmax(1))
    one = metalcore.cross_entropy(x[0, :, 0, 0], target[0, 0, 0], return_predicted_tokens=True)
    assert one.predicted_tokens.shape == () and one.z_loss is None and one.token_accuracy is None
    hidden, weight = torch.randn(9, 4, device=device, requires_grad=True), torch.randn(6, 4, device=device)
    results = []
    for convert in (lambda x: x.detach().to(device), wide):
        h = convert(hidden).requires_grad_()
        options = {"token_weight": convert(torch.linspace(0.5, 1, 9)), "reduction": "sum"}
        if h.dtype == torch.float64:
            loss = reference(h @ wide(weight).T, target.flatten()[:9].cpu(), scaling=True, **options)[0]
        else:
            options |= {"token_scaling": True, "chunk": 4}
            loss = metalcore.fused_linear_cross_entropy(h, weight, target.flatten()[:9], **options)
        (first,) = torch.autograd.grad(loss, h, create_graph=True)
        results.append((first, *torch.autograd.grad(first.square().sum(), h)))
    for ours, theirs in zip(*results):
        torch.testing.assert_close(wide(ours), theirs, rtol=1e-4, atol=1e-5)


def test_modules(device):
    x, target = torch.randn(8, 5, device=device), torch.randint(5, (8,), device=device)
    module = metalcore.nn.CrossEntropyLoss(z_loss=0.1, softcap=2.0, **EVERYTHING)
    for ours, theirs in zip(
        module(x, target), metalcore.cross_entropy(x, target, z_loss=0.1, softcap=2.0, **EVERYTHING)
    ):
        assert torch.equal(ours, theirs)
    linear = metalcore.nn.LinearCrossEntropyLoss(5, 4, device=device, accum_dtype=torch.float32, **EVERYTHING)
    tokens = torch.rand(8, device=device)
    found = linear(x, target % 4, tokens)
    expected = metalcore.fused_linear_cross_entropy(x, linear.linear.weight, target % 4, token_weight=tokens)
    torch.testing.assert_close(found.loss, expected)


@pytest.mark.parametrize("wide_sum", [True, False])
def test_the_weights_gradient_does_not_lose_chunks(device, wide_sum):
    """Every chunk has the same gradient. A sum of 16 bits stops growing where a chunk is below half of its last
    place."""
    chunks, dtype = 1024, torch.bfloat16
    hidden = torch.randn(1, 8).to(dtype).expand(chunks, 8).to(device)
    weight = torch.randn(6, 8).to(dtype)
    ours = weight.to(device).requires_grad_()
    target = torch.zeros(chunks, dtype=torch.int64, device=device)
    accumulation = {} if wide_sum else {"accum_dtype": dtype}
    loss = metalcore.fused_linear_cross_entropy(hidden, ours, target, chunk=1, reduction="sum", **accumulation)
    (found,) = torch.autograd.grad(loss, ours)
    theirs = wide(weight).requires_grad_()
    expected = F.cross_entropy(wide(hidden[:1]) @ theirs.T, target[:1].cpu())
    (expected,) = torch.autograd.grad(expected * chunks, theirs)
    error = ((wide(found) - expected).abs().max() / expected.abs().max()).item()
    exact, few = (
        torch.autograd.grad(
            metalcore.fused_linear_cross_entropy(hidden, ours, target, chunk=256, reduction="sum", accum_dtype=kind),
            ours,
        )[0]
        for kind in (torch.float32, None)
    )
    assert ((exact - few).abs().max() / exact.abs().max()).item() <= 4 * torch.finfo(dtype).eps  # four roundings
    # Logits, their gradient, a product, and the result are rounded; the logits' error is that of a sum of 8 products.
    assert (error <= 12 * torch.finfo(dtype).eps) == wide_sum, error


@pytest.mark.parametrize("call", [metalcore.fused_linear_jsd, metalcore.fused_linear_kl_div])
def test_the_weights_gradient_of_divergences(device, call):
    chunks, dtype = 1024, torch.bfloat16
    hidden, teacher = torch.randn(2, 1, 8).to(dtype).expand(2, chunks, 8)
    weight, other = torch.randn(2, 6, 8).to(dtype)
    results = []
    for convert, chunk in ((lambda x: x.to(device), 1), (wide, None)):
        w = convert(weight).requires_grad_()
        loss = call(convert(hidden), w, convert(teacher), convert(other), chunk=chunk) * chunks
        results.append(wide(torch.autograd.grad(loss, w)[0]))
    assert ((results[0] - results[1]).abs().max() / results[1].abs().max()).item() <= 24 * torch.finfo(dtype).eps


def test_errors(device):
    x, target = torch.randn(4, 3, device=device), torch.randint(3, (4,), device=device)
    with pytest.raises(ValueError, match="cross_entropy: token_scaling and the results besides the loss need classes"):
        metalcore.cross_entropy(x, x.softmax(-1), return_z_loss=True)
    with pytest.raises(
        ValueError, match="accum_dtype must be None, torch.float32 or the weight's dtype, not torch.int8"
    ):
        metalcore.fused_linear_cross_entropy(x, x, target, accum_dtype=torch.int8)
    with pytest.raises(ValueError, match=r"token_weight must have target's shape \[4\] and a floating-point dtype"):
        metalcore.fused_linear_cross_entropy(x, x, target, token_weight=x)
