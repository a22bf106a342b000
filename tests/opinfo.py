"""Compares a metalcore function with its torch namesake, on the inputs with which PyTorch tests the namesake (OpInfo).

    from opinfo import check_errors, check_samples

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_silu_samples(device, dtype):
        check_samples(metalcore.silu, "nn.functional.silu", device, dtype)

    def test_silu_errors(device):
        check_errors(metalcore.silu, "nn.functional.silu", device)

The reference is the namesake in float64 on the CPU, on the same rounded inputs. An error is relative to the largest
value of its tensor or to 1, whichever is larger, and is at most

    4 ** (order + 1) * n * eps

where eps is the dtype's, and n is the size of the largest dimension in the input (the longest possible sum; at least
8). The order is 0 for the result, 1 for its gradients, and 2 for the gradients' gradients. Infinities and NaNs must be
in the same places. Each sample runs twice: with its tensors as they come, and with every tensor non-contiguous.
"""

import pytest
import torch
from op_db import tensors
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import noncontiguous_like
from torch.utils._pytree import tree_flatten, tree_map


def find_op(name, variant=""):
    """PyTorch's OpInfo of a function, e.g. "softmax" or "linalg.qr"; some have variants, e.g. "with_dtype"."""
    for op in op_db:
        if op.name == name and op.variant_test_name == variant:
            return op
    raise LookupError(f"PyTorch has no OpInfo {name!r} with variant {variant!r}")


def samples(name, dtype, variant=""):
    """The samples of an op as (input, args, kwargs) on the CPU, except those that ask for float64, which MPS lacks."""
    op = find_op(name, variant)
    torch.manual_seed(0)
    for sample in op.sample_inputs("cpu", dtype, requires_grad=False):
        if torch.float64 not in tree_flatten((sample.args, sample.kwargs))[0]:
            yield sample.input, sample.args, sample.kwargs


def error_inputs(name, device, variant=""):
    """The ErrorInputs of an op: .sample_input, .error_type, .error_regex. Empty where the op defines none."""
    op = find_op(name, variant)
    return [] if op.error_inputs_func is None else list(op.error_inputs(device))


def check_samples(function, name, device, dtype, *, variant="", orders=2, select=None, results=None, condition=None):
    """Compares `function` with torch's `name` for every sample of `dtype`.

    orders: 0 compares results, 1 also gradients, 2 also the gradients' gradients, each along a random direction, as far
        as torch's function is differentiable.
    select: `select(input, args, kwargs) -> bool` chooses samples, e.g. those whose result is unique.
    results: `results(output) -> tensors` chooses what is compared (and differentiated); everything by default.
    condition: `condition(input, args, kwargs) -> float` is the factor by which results amplify an error of the input,
        and each derivative amplifies the error of the one before; 1 by default.
    """
    op = find_op(name, variant)
    compared = 0
    for sample in samples(name, dtype, variant):
        if select is not None and not select(*sample):
            continue
        for prepare in (lambda tensor: tensor, noncontiguous_like):
            actual = evaluate(function, placed(sample, device, dtype, prepare), orders, results)
            expected = evaluate(op.op, placed(sample, "cpu", torch.float64, prepare), orders, results)
            compare(actual, expected, sample, dtype, condition(*sample) if condition else 1.0)
        compared += 1
    assert compared, f"{name}: no sample of {dtype} was compared"


def check_errors(function, name, device, *, variant="", messages=False):
    """Checks that `function` raises the errors of torch's `name` for its error inputs, with its words if `messages`."""
    checked = 0
    for error in error_inputs(name, device, variant):
        sample = error.sample_input
        with pytest.raises(error.error_type, match=error.error_regex if messages else None):
            function(sample.input, *sample.args, **sample.kwargs)
        checked += 1
    assert checked, f"PyTorch defines no error inputs for {name}"


def placed(sample, device, dtype, prepare):
    """A copy of a sample's tensors on a device; floating-point ones have `dtype` and require gradients."""

    def place(value):
        if not isinstance(value, torch.Tensor):
            return value
        if not value.is_floating_point():
            return prepare(value.to(device))
        return prepare(value.detach().to(device=device, dtype=dtype)).requires_grad_()

    return tree_map(place, sample)


def evaluate(function, sample, orders, results):
    """Lists of tensors: the results, the gradients and the gradients' gradients, up to `orders`."""
    input, args, kwargs = sample
    output = function(input, *args, **kwargs)
    values = [tensors(output if results is None else results(output))]
    leaves = [tensor for tensor in tensors(sample) if tensor.requires_grad]
    previous = values[0]
    for order in range(orders):
        previous = [tensor for tensor in previous if tensor is not None and tensor.requires_grad]
        if not previous:
            break
        directions = [direction(tensor, seed) for seed, tensor in enumerate(previous)]
        previous = torch.autograd.grad(previous, leaves, directions, create_graph=order + 1 < orders, allow_unused=True)
        values.append(list(previous))
    return values


def direction(tensor, seed):
    """Random numbers for a tensor, the same on every device and in every dtype except for rounding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tensor.shape, generator=generator).to(device=tensor.device, dtype=tensor.dtype)


def compare(actual, expected, sample, dtype, condition):
    extents = [extent for tensor in tensors(sample) for extent in tensor.shape]
    terms = max([8, *extents])
    assert len(actual) >= len(expected), f"{len(actual) - 1} derivatives instead of {len(expected) - 1}: {sample}"
    for order, (ours, theirs) in enumerate(zip(actual, expected)):
        bound = (4 * condition) ** (order + 1) * terms * torch.finfo(dtype).eps
        assert len(ours) == len(theirs), f"{len(ours)} tensors instead of {len(theirs)}: {sample}"
        for value, reference in zip(ours, theirs):
            if value is None or reference is None:
                zero = [tensor for tensor in (value, reference) if tensor is not None]
                assert all(not tensor.any() for tensor in zero), f"one gradient of order {order} is missing: {sample}"
                continue
            assert value.shape == reference.shape, f"{value.shape} instead of {reference.shape}: {sample}"
            scale = max(1.0, reference[reference.isfinite()].abs().max().item() if reference.isfinite().any() else 1.0)
            torch.testing.assert_close(
                value.detach().cpu().double(),
                reference.detach().double(),
                rtol=0,
                atol=bound * scale,
                equal_nan=True,
                msg=lambda text: f"order {order}, {sample}: {text}",
            )
