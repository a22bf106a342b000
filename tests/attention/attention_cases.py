"""What the tests of attention share: inputs, and three ways to compute each case.

An error is at most twice that of PyTorch's own formula (its math backend) in the same dtype, against float64, in the
norm of the whole tensor and in the largest element; a quarter of a rounding of the largest value is added to the one
and a rounding to the other, for cases in which PyTorch makes no error.
"""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import metalcore


def make(q, k, v, dtype, *, scale=1.0, seed=0):
    """Rounded tensors on the CPU, of which q has its heads inside of its rows, as transformers' models have."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in (q, k, v))
    return (q * scale).transpose(1, 2).contiguous().transpose(1, 2), k, v


def by_torch(q, k, v, mask=None, **options):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, mask, **options)


def random_directions(results, dtype):
    """The gradients that the results of a case get, rounded to the dtype."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(x.shape, generator=generator).to(dtype) for x in results]


def computed(function, tensors, device, dtype, options, mask=None, directions=()):
    """Results, and gradients of all tensors and of a floating-point mask, in float64 on the CPU."""

    def place(tensor):
        if not tensor.is_floating_point():
            return tensor.to(device)
        return tensor.detach().to(device, dtype).requires_grad_()

    leaves = [place(tensor) for tensor in tensors]
    options = {name: place(x) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    placed_mask = None if mask is None else place(mask)
    results = function(*leaves, placed_mask, **options)
    results = results if isinstance(results, tuple) else (results,)
    wanted = [x for x in (*leaves, placed_mask, *options.values()) if isinstance(x, torch.Tensor) and x.requires_grad]
    directions = [x.to(result) for x, result in zip(random_directions(results, tensors[0].dtype), results)]
    gradients = torch.autograd.grad(results, wanted, directions)
    return [x.detach().cpu().double() for x in (*results, *gradients)]


def check(device, tensors, mask=None, formula=by_torch, more=None, **options):
    """Compares metalcore's results and gradients with the formula's in float64, and their errors with those that the
    formula makes in the tensors' dtype. `more` is {number of a tensor: what else its error may have}."""
    dtype = tensors[0].dtype
    ours = computed(metalcore.scaled_dot_product_attention, tensors, device, dtype, options, mask)
    exact = computed(formula, tensors, "cpu", torch.float64, options, mask)
    theirs = computed(formula, tensors, "cpu", dtype, options, mask)
    eps = torch.finfo(dtype).eps
    least = 1e-6 * max(x[x.isfinite()].abs().max() for x in exact if x.numel())  # where the exact value is zero
    for index, (a, b, c) in enumerate(zip(ours, exact, theirs, strict=True)):
        assert a.shape == b.shape
        assert torch.equal(a.isfinite(), b.isfinite()), f"tensor {index}: other places are not finite"
        a, b, c = (x[b.isfinite()] for x in (a, b, c))
        if not b.numel():
            continue
        error, usual, largest = a - b, c - b, b.abs().max()
        norm, most = error.norm(), error.abs().max()
        further = (more or {}).get(index, 0.0)
        bound = 2 * usual.norm() + eps / 4 * b.norm() + least * b.numel() ** 0.5 + further
        assert norm <= bound, f"tensor {index}: {norm} and PyTorch {usual.norm()}"
        assert most <= 2 * usual.abs().max() + eps * largest + least + further, (
            f"tensor {index}: {most} and {usual.abs().max()}"
        )
