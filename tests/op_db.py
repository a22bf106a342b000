"""PyTorch's own operator samples (op_db), on a device against eager PyTorch on the CPU.

    python tests/op_db.py eager [--only TEXT]
    python tests/op_db.py compiled [--only TEXT] [--samples N] [--dtype int32]

`eager` runs samples of each entry, and their gradients, on the simulated device; each result has the CPU's bits, except
for those of the listed entries. `compiled` runs the first samples through torch.compile(backend="metalcore"); an entry
agrees, is random (shapes are compared), falls back (PyTorch runs it, with the reason), or is wrong.
"""

import argparse
import collections
import itertools
import random
import sys
import time
import warnings

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

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
# Some entries have a thousand samples, the products of all their options; a random choice has each option many times.
MOST = 24
# Their values are what the memory held before; shape, dtype and device are compared.
UNINITIALIZED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}


def entry_name(op):
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def difference(expected, actual, tolerance, shapes_only=False):
    """Says how results differ from the CPU's; "" if they do not. A tolerance of 0 asks for equal bits, except those of
    NaNs."""
    expected, actual = tensors(expected), tensors(actual)
    if len(expected) != len(actual):
        return f"{len(actual)} tensors instead of {len(expected)}"
    for cpu, result in zip(expected, actual):
        if result.shape != cpu.shape or result.dtype != cpu.dtype:
            return f"{result.dtype}{tuple(result.shape)} instead of {cpu.dtype}{tuple(cpu.shape)}"
        if shapes_only:
            continue
        try:
            cpu, result = cpu.detach(), result.detach().cpu()
            torch.testing.assert_close(result, cpu, rtol=tolerance, atol=tolerance, equal_nan=True)
        except (AssertionError, NotImplementedError) as error:
            return " ".join(str(error).split())[:200]
    return ""


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
    results = tensors(output)
    leaves = [leaf for leaf in tensors((input, args, kwargs)) if leaf.requires_grad]
    differentiable = [leaf for leaf in tensors(sample.output_process_fn_grad(output)) if leaf.requires_grad]
    if leaves and differentiable:
        sums = [result.abs().sum() if result.is_complex() else result.sum() for result in differentiable]
        gradients = torch.autograd.grad(sums, leaves, allow_unused=True)
        results += [gradient for gradient in gradients if gradient is not None]
    return results


def asks_for_float64(sample):
    doubles = (torch.float64, torch.complex128)
    leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
    return any(
        leaf in (*doubles, float, complex)
        if isinstance(leaf, (torch.dtype, type))
        else isinstance(leaf, torch.Tensor) and leaf.dtype in doubles
        for leaf in leaves
    )


def compare_eager(op, device="mps"):
    """The first difference or error of an op's samples, "" where all agree, without samples that ask for float64."""
    tolerance = ROUNDING if entry_name(op) in CLOSE else 0.0
    dtype = sample_dtype(op)
    differentiable = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    torch.manual_seed(0)
    compared = 0
    samples = [s for s in op.sample_inputs("cpu", dtype, requires_grad=differentiable) if not asks_for_float64(s)]
    if len(samples) > MOST:
        samples = random.Random(0).sample(samples, MOST)
    for sample in samples:
        try:
            expected = run(op, sample, "cpu")
        except (AssertionError, NotImplementedError):
            continue  # the CPU refuses it too
        try:
            actual = run(op, sample, device)
            elsewhere = [result.device for result in actual if result.device.type != device]
            problem = difference(expected, actual, tolerance, shapes_only=op.name in UNINITIALIZED)
        except Exception as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if problem or elsewhere:
            return problem or f"a result on {elsewhere[0]}"
        compared += 1
    return "" if compared else "no sample could be compared"


def compare_compiled(op, device, samples=1, dtype=torch.float32):
    """("agrees" | "random" | "falls back" | "wrong", why)."""
    found = []
    torch.manual_seed(0)
    random.seed(0)
    for sample in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=False), samples):
        found.append(_compare(op, sample, device))
        if found[-1][0] == "wrong":
            break
    if not found:
        return "falls back", "there is no sample"
    order = ("wrong", "falls back", "random", "agrees")
    return min(found, key=lambda result: order.index(result[0]))


def _compare(op, sample, device):
    from metalcore import programs

    def call(input, args, kwargs):
        return op.op(input, *args, **kwargs)

    def wrong_in(result):
        # PyTorch's sample turns results that an op may choose, as signs of eigenvectors, into what all choices share.
        shared = [sample.output_process_fn_grad(each) for each in (expected, result)]
        return difference(*shared, 1e-4, shapes_only=_is_random(op))

    given = (sample.input, sample.args, sample.kwargs)
    expected = _attempt(lambda: call(*_copies(given, "cpu")))
    if isinstance(expected, Exception):
        return "falls back", "eager PyTorch refuses the sample"
    torch._dynamo.reset()
    with programs.observe() as graphs, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(call, backend="metalcore", dynamic=False)
        result = _attempt(lambda: compiled(*_copies(given, device)))
    if isinstance(result, Exception):
        eager = _attempt(lambda: call(*_copies(given, device)))
        if isinstance(eager, Exception):
            return "falls back", "eager PyTorch refuses it on the device"
        return "wrong", f"{type(result).__name__}: {result}"[:300]
    left = [note for graph in graphs for note in graph.notes if note.startswith("PyTorch runs")]
    if wrong := wrong_in(result):
        eager = _attempt(lambda: call(*_copies(given, device)))
        if isinstance(eager, Exception) or wrong_in(eager):
            return "falls back", "eager PyTorch differs on the device too"
        return "wrong", wrong
    if left or not any(graph.programs for graph in graphs):
        return "falls back", (left or ["dynamo makes no graph of it"])[0]
    return ("random" if _is_random(op) else "agrees"), ""


def _copies(given, device):
    return tree_map(lambda x: x.detach().clone().to(device) if isinstance(x, torch.Tensor) else x, given)


def _attempt(function):
    try:
        return function()
    except Exception as error:
        return error


def _is_random(op):
    text = f"{op.name} {op.variant_test_name}"
    words = ("rand", "dropout", "bernoulli", "normal", "multinomial", "uniform", "exponential", "geometric", "cauchy")
    return any(word in text for word in (*words, "rrelu", "empty", "new_empty", "lowrank"))


def report_eager(ops):
    outcomes = {entry_name(op): compare_eager(op) for op in ops}
    equal = {name for name, problem in outcomes.items() if not problem}
    print(f"{len(equal - CLOSE.keys())} of {len(outcomes)} entries equal the CPU bit by bit, ", end="")
    print(f"{len(equal & CLOSE.keys())} except for rounding")
    reasons = collections.defaultdict(list)
    for name, problem in outcomes.items():
        if problem:
            reasons[EXCEPTIONS.get(name, f"UNEXPECTED {problem}")].append(name)
        elif name in EXCEPTIONS:
            reasons["UNEXPECTED: equal, though it is listed as an exception"].append(name)
    for reason, entries in reasons.items():
        print(f"{len(entries):4d} {reason}: {', '.join(entries)}")
    return any(reason.startswith("UNEXPECTED") for reason in reasons)


def report_compiled(ops, samples, dtype):
    counts, start = collections.Counter(), time.time()
    for op in ops:
        if dtype in op.dtypes:
            kind, why = compare_compiled(op, "mps", samples, dtype)
            counts[kind] += 1
            if why:
                print(f"{kind:10} {entry_name(op)}: {why}", flush=True)
    print(f"{time.time() - start:.0f} s:", dict(counts))
    return counts["wrong"] > 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=["eager", "compiled"])
    parser.add_argument("--samples", type=int, default=1, help="how many of each entry are compiled")
    parser.add_argument("--dtype", default="float32", help="of the compiled samples")
    parser.add_argument("--only", default="", help="entries with this text in their names")
    arguments = parser.parse_args()
    import metalcore.simulator  # noqa: F401

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ops = [op for op in op_db if arguments.only in entry_name(op)]
    if arguments.way == "eager":
        return report_eager(ops)
    return report_compiled(ops, arguments.samples, getattr(torch, arguments.dtype))


if __name__ == "__main__":
    sys.exit(main())
