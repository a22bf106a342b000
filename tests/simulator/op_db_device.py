"""Runs PyTorch's own operator samples (op_db) on the simulated device and on the CPU, and compares them bit by bit.

`python -m metalcore.simulator tests/simulator/op_db_device.py [name ...]` prints how many entries agree, and why
some do not.
"""

import collections
import sys
import warnings

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_map

# The entries whose results differ from the CPU's, and why.
FLOAT64 = "asks for float64, which MPS lacks"
SPARSE = "needs sparse tensors, which the simulated device lacks"
CUDA_ONLY = "exists on CUDA only"
EXCEPTIONS = {
    "bincount": FLOAT64,
    "cdouble": FLOAT64,
    "double": FLOAT64,
    "float_power": FLOAT64,
    "log_softmax.with_dtype": FLOAT64,
    "nn.functional.softmin.with_dtype": FLOAT64,
    "softmax.with_dtype": FLOAT64,
    "to": FLOAT64,
    "sparse.mm.reduce": SPARSE,
    "sparse.sampled_addmm": SPARSE,
    "to_sparse": SPARSE,
    "jiterator_2inputs_2outputs": CUDA_ONLY,
    "jiterator_4inputs_with_extra_args": CUDA_ONLY,
    "jiterator_binary": CUDA_ONLY,
    "jiterator_binary_return_by_ref": CUDA_ONLY,
    "jiterator_unary": CUDA_ONLY,
    "torch.ops.aten._efficient_attention_forward": CUDA_ONLY,
    "torch.ops.aten._flash_attention_forward": CUDA_ONLY,
}
# PyTorch itself computes these in another way on an accelerator than on the CPU. They agree except for rounding: sums
# of up to a few hundred terms in another order.
CLOSE = {
    "inner": "mm instead of dot",
    "linalg.lstsq": "gels instead of gelsy",
    "linalg.lstsq.grad_oriented": "gels instead of gelsy",
    "nn.functional.scaled_dot_product_attention": "the composite instead of flash attention",
    "renorm": "norms in float32 instead of float64",
    "tensordot": "mm of other shapes",
}
ROUNDING = 256 * torch.finfo(torch.float32).eps
# Their values are what the memory held before; shape, dtype and device are compared.
UNINITIALIZED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}


def entry_name(op):
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def sample_dtype(op):
    preferred = (torch.float32, torch.complex64, torch.int64, torch.bool)
    return next((dtype for dtype in preferred if dtype in op.dtypes), next(iter(op.dtypes), torch.float32))


def copy_to(tensor, device):
    """A copy with the same strides, offset and storage size: `to` would not keep them."""
    if tensor.layout != torch.strided:
        return tensor.to(device)
    plain = tensor.detach()
    if plain.is_conj():
        return copy_to(plain.conj(), device).conj()
    if plain.is_neg():
        return copy_to(torch._neg_view(plain), device)._neg_view()
    memory = torch.empty(0, dtype=plain.dtype).set_(plain.untyped_storage())
    copy = memory.to(device, copy=True).as_strided(plain.size(), plain.stride(), plain.storage_offset()).detach()
    return copy.requires_grad_(tensor.requires_grad)


def place(op, sample, device):
    """A sample's input, args and kwargs on a device."""

    def move(value):
        if isinstance(value, torch.Tensor):
            # tensor_split takes its indices from the CPU on each device.
            return value if op.name == "tensor_split" and value is not sample.input else copy_to(value, device)
        if isinstance(value, torch.device) or isinstance(value, str) and value in ("cpu", "mps"):
            return torch.device(device)
        return value

    return tree_map(move, (sample.input, sample.args, sample.kwargs))


def run(op, sample, device):
    """The tensors that an op returns, and their gradients."""
    input, args, kwargs = place(op, sample, device)
    torch.manual_seed(7)
    with torch.device(device):
        output = op(input, *args, **kwargs)
    results = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, torch.Tensor)]
    leaves = [
        leaf for leaf in tree_flatten((input, args, kwargs))[0] if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    differentiable = [
        leaf
        for leaf in tree_flatten(sample.output_process_fn_grad(output))[0]
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    if leaves and differentiable:
        sums = [result.abs().sum() if result.is_complex() else result.sum() for result in differentiable]
        gradients = torch.autograd.grad(sums, leaves, allow_unused=True)
        results += [gradient for gradient in gradients if gradient is not None]
    return results


def difference(expected, actual, device, tolerance):
    """Says how results on the device differ from the CPU's; None if they do not. A tolerance of 0 asks for equal bits,
    except those of NaNs."""
    if len(expected) != len(actual):
        return f"{len(actual)} tensors instead of {len(expected)}"
    for cpu, result in zip(expected, actual):
        if result.device.type != device:
            return f"a result on {result.device}"
        if result.shape != cpu.shape or result.dtype != cpu.dtype:
            return f"{result.dtype}{tuple(result.shape)} instead of {cpu.dtype}{tuple(cpu.shape)}"
        torch.testing.assert_close(result.detach().cpu(), cpu.detach(), rtol=tolerance, atol=tolerance, equal_nan=True)
    return None


def asks_for_float64(sample):
    doubles = (torch.float64, torch.complex128)
    leaves = tree_flatten((sample.input, sample.args, sample.kwargs))[0]
    return any(
        leaf in (*doubles, float, complex)
        if isinstance(leaf, (torch.dtype, type))
        else isinstance(leaf, torch.Tensor) and leaf.dtype in doubles
        for leaf in leaves
    )


def compare(op, device="mps"):
    """None where all samples of an op agree, or else the first difference or error. Samples that ask for float64 are
    left out."""
    tolerance = ROUNDING if entry_name(op) in CLOSE else 0.0
    dtype = sample_dtype(op)
    differentiable = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    torch.manual_seed(0)
    compared = 0
    for sample in op.sample_inputs("cpu", dtype, requires_grad=differentiable):
        if asks_for_float64(sample):
            continue
        try:
            expected = run(op, sample, "cpu")
        except (AssertionError, NotImplementedError):
            continue  # the CPU refuses it too
        try:
            actual = run(op, sample, device)
            if op.name in UNINITIALIZED:
                expected, actual = map(torch.zeros_like, expected), map(torch.zeros_like, actual)
            problem = difference(list(expected), list(actual), device, tolerance)
        except Exception as error:
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if problem:
            return problem
        compared += 1
    return None if compared else "no sample could be compared"


def main(names):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    outcomes = {entry_name(op): compare(op) for op in op_db if not names or op.name in names}
    equal = [name for name, outcome in outcomes.items() if outcome is None]
    print(
        f"{len([name for name in equal if name not in CLOSE])} of {len(outcomes)} entries equal the CPU bit by bit, "
        f"{len([name for name in equal if name in CLOSE])} but for rounding"
    )
    reasons = collections.defaultdict(list)
    for name, outcome in outcomes.items():
        if outcome is not None:
            reasons[EXCEPTIONS.get(name, f"UNEXPECTED {outcome}")].append(name)
        elif name in EXCEPTIONS:
            reasons["UNEXPECTED: equal, though it is listed as an exception"].append(name)
    for reason, entries in reasons.items():
        print(f"{len(entries):4d} {reason}: {', '.join(entries)}")


if __name__ == "__main__":
    main(sys.argv[1:])
