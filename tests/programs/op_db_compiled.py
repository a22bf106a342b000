"""PyTorch's sample inputs of all operators through torch.compile(backend="metalcore"), on the simulated device.

    python tests/programs/op_db_compiled.py [--samples N] [--only TEXT]

Each entry of op_db is compared with eager PyTorch on the CPU. It agrees, is random (shapes are compared), falls back
(PyTorch runs it, with the reason), or is wrong.
"""

import argparse
import itertools
import random
import sys
import time
import warnings
from collections import Counter

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

from metalcore import programs


def entries(names=None):
    """The entries with float32 samples, each as (name, OpInfo)."""
    for op in op_db:
        name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
        if (names is None or name in names) and torch.float32 in op.dtypes:
            yield name, op


def outcome(op, device, samples=1):
    """("agrees" | "random" | "falls back" | "wrong", why)."""
    found = []
    torch.manual_seed(0)
    random.seed(0)
    for sample in itertools.islice(op.sample_inputs("cpu", torch.float32, requires_grad=False), samples):
        found.append(_compare(op, sample, device))
        if found[-1][0] == "wrong":
            break
    if not found:
        return "falls back", "there is no sample"
    order = ("wrong", "falls back", "random", "agrees")
    return min(found, key=lambda result: order.index(result[0]))


def _compare(op, sample, device):
    def call(input, args, kwargs):
        return op.op(input, *args, **kwargs)

    def difference(result):
        # Of results that an op may choose (the signs of eigenvectors), PyTorch's sample makes what all choices share.
        shared = [sample.output_process_fn_grad(each) for each in (expected, result)]
        return _difference(*shared, _is_random(op))

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
    if wrong := difference(result):
        eager = _attempt(lambda: call(*_copies(given, device)))
        if isinstance(eager, Exception) or difference(eager):
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


def _difference(expected, result, shapes_only):
    a, b = ([x for x in tree_leaves(t) if isinstance(x, torch.Tensor)] for t in (expected, result))
    if len(a) != len(b):
        return f"{len(b)} tensors instead of {len(a)}"
    for x, y in zip(a, b):
        if x.shape != y.shape or x.dtype != y.dtype:
            return f"{y.dtype} {list(y.shape)} instead of {x.dtype} {list(x.shape)}"
        if shapes_only:
            continue
        try:
            torch.testing.assert_close(y.cpu(), x.cpu(), rtol=1e-4, atol=1e-4, equal_nan=True)
        except (AssertionError, NotImplementedError) as error:
            return str(error).splitlines()[0][:200]
    return ""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    import metalcore.simulator  # noqa: F401

    torch.set_num_threads(1)
    counts, start = Counter(), time.time()
    for name, op in entries():
        if arguments.only in name:
            kind, why = outcome(op, "mps", arguments.samples)
            counts[kind] += 1
            if why:
                print(f"{kind:10} {name}: {why}", flush=True)
    print(f"{time.time() - start:.0f} s:", dict(counts))
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
