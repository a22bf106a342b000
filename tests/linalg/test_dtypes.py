"""What every function of linear algebra does with dtypes that its kernels lack."""

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from metalcore._core.registry import OPS

LINALG = {name: op for name, op in OPS.items() if op.family == "linalg"}


def arguments(op, dtype, device):
    """The arguments of an op's first sample of each set of options."""
    samples = {str(sample.options): sample for sample in reversed(list(op.samples()))}
    for sample in samples.values():
        yield sample.arguments(*sample.make(device, dtype)), sample.options


def outcome(op, function, given, options):
    """Tensors, or the error."""
    torch.manual_seed(0)
    try:
        return [leaf for leaf in tree_leaves(op.call(function, *given, **options)) if isinstance(leaf, torch.Tensor)]
    except torch.linalg.LinAlgError as error:
        return str(error)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LINALG)
def test_half_precision_is_computed_in_float32(device, dtype, name):
    op = LINALG[name]
    for given, options in arguments(op, dtype, device):
        wide = tree_map(lambda x: x.float() if isinstance(x, torch.Tensor) and x.dtype == dtype else x, given)
        found, expected = (outcome(op, op.function, each, options) for each in (given, wide))
        for ours, theirs in zip(found, expected, strict=True):
            narrow = theirs.is_floating_point() and tree_leaves(given)[0].dtype == dtype  # some samples are complex
            assert ours.dtype == (dtype if narrow else theirs.dtype)
            assert torch.equal(ours, theirs.to(ours.dtype))


# lstsq has the default of GPUs, gels, also on the CPU, where PyTorch's is gelsy. PyTorch's lobpcg takes no complex A.
OTHERS = [name for name, op in LINALG.items() if op.namesake and name not in ("lstsq", "lobpcg")]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("name", OTHERS)
def test_other_input_goes_to_torch(dtype, name):
    op = LINALG[name]
    for given, options in arguments(op, dtype, "cpu"):
        found, expected = (outcome(op, each, given, options) for each in (op.function, op.pytorch))
        if isinstance(expected, str):
            assert found == expected
        else:
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
