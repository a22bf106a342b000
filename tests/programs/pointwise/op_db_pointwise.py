"""PyTorch's samples of pointwise operations (op_db), through generated kernels and through PyTorch on the CPU.

`python -m metalcore.simulator tests/programs/pointwise/op_db_pointwise.py [name ...]` prints how many entries agree,
how many the generator refuses, and which differ.
"""

import collections
import sys
import warnings

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_unflatten

from metalcore.programs import pointwise

DTYPES = (torch.float32, torch.int32, torch.bool)
# Results may be off by so many units in the last place: PyTorch's functions on CPUs, and ours, are off by a few each.
ULPS = 16


def entry_name(op):
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def entries(names=()):
    return [op for op in op_db if not names or entry_name(op) in names]


def samples(op, dtype, most=6):
    """Functions of tensors, with the tensors: at most one sample of each structure of shapes."""
    found = {}
    for sample in op.sample_inputs("cpu", dtype, requires_grad=False):
        leaves, structure = tree_flatten((sample.input, sample.args, sample.kwargs))
        places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

        def function(*tensors, leaves=leaves, structure=structure, places=places):
            filled = list(leaves)
            for place, tensor in zip(places, tensors):
                filled[place] = tensor
            first, args, kwargs = tree_unflatten(filled, structure)
            return op(first, *args, **kwargs)

        key = tuple(leaf.shape if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves)
        if places and key not in found and len(found) < most:
            found[key] = function, [leaves[place] for place in places]
    return list(found.values())


def merged(made):
    """One function of all samples' tensors, so that outputs of one shape share a kernel."""
    tensors = [tensor for _, own in made for tensor in own]

    def function(*given):
        left, results = list(given), []
        for sample, own in made:
            results += tree_flatten(sample(*left[: len(own)]))[0]
            del left[: len(own)]
        return tuple(results)

    return function, tensors


def refusal(graph):
    """The first reason why a traced graph is refused, or None."""
    for node in graph.nodes:
        if node.op not in ("placeholder", "output") and (reason := pointwise.supports(node)):
            return f"{node.target}: {reason}"
    return None


def difference(made, expected):
    """What is wrong with a result, in words; None where it agrees."""
    if (made.shape, made.dtype, made.stride()) != (expected.shape, expected.dtype, expected.stride()):
        return f"{made.dtype} {made.shape} {made.stride()}, not {expected.dtype} {expected.shape} {expected.stride()}"
    made = made.cpu()
    if not expected.dtype.is_floating_point:
        return None if torch.equal(made, expected) else f"{made} is not {expected}"
    a, b = made.double(), expected.double()
    same = (a == b) | (a.isnan() & b.isnan())
    eps = torch.finfo(expected.dtype).eps
    close = (a - b).abs() <= ULPS * eps * b.abs().clamp_min(torch.finfo(expected.dtype).tiny / eps)
    wrong = ~(same | close)
    return None if not wrong.any() else f"{a[wrong][:4].tolist()} is not {b[wrong][:4].tolist()}"


def check_samples(made, device):
    """What is wrong with the results of merged samples; None where they agree.

    Raises:
        pointwise.Unsupported: the generator refuses a node.
    """
    function, tensors = merged(made)
    traced = make_fx(function, tracing_mode="fake")(*tensors)
    if reason := refusal(traced.graph):
        raise pointwise.Unsupported(reason)
    placed = [tensor.to(device) if tensor.dim() else tensor for tensor in tensors]
    results = pointwise.build(traced, placed)(*placed)
    wrong = (difference(*pair) for pair in zip(results, function(*tensors), strict=True))
    return next((words for words in wrong if words), None)


def main(names):
    warnings.simplefilter("ignore")
    counts, reasons = collections.Counter(), collections.Counter()
    for op in entries(names):
        name = entry_name(op)
        for dtype in DTYPES:
            if dtype not in op.dtypes:
                continue
            torch.manual_seed(0)
            try:
                made = samples(op, dtype, most=3)
                if not made:
                    continue
                wrong = check_samples(made, "mps")
            except pointwise.Unsupported as reason:
                counts["refused"] += 1
                reasons[str(reason).split(":")[0]] += 1
                continue
            except Exception as error:
                if "metalcore" in str(error) or "program_source" in str(error) or names:
                    counts["wrong"] += 1
                    print(f"{name} {dtype}: {type(error).__name__}: {str(error)[:400]}", flush=True)
                else:
                    counts["cannot be traced"] += 1
                continue
            counts["wrong" if wrong else "agree"] += 1
            if wrong:
                print(f"{name} {dtype}: {wrong}", flush=True)
            elif names:
                print(f"{name} {dtype}: agrees")
    print(dict(counts))
    print(reasons.most_common(60))


if __name__ == "__main__":
    main(sys.argv[1:])
