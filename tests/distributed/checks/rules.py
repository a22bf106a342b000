"""What the rules of operators say, done: results on shards against those on one device."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import metalcore
import metalcore.distributed.rules._rule as rules
from metalcore._core.registry import OPS

SAMPLES = 2  # of each op, the smallest ones that there are
# Operators on lists, which tests of optimizers call, and those that take no DTensors.
LEFT_OUT = rules._LISTS | {name for name, rule in rules.RULES.items() if rule.__name__ == "refuse"}


class _Calls(TorchDispatchMode):
    """Keeps the arguments of operators that have rules for tensors."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if func.namespace == "metalcore" and name in rules.RULES and name not in LEFT_OUT:
            self.found.setdefault(name, []).append((func, _copies(args), kwargs or {}))
        return func(*args, **(kwargs or {}))


def _copies(args):
    return tree_map_only(torch.Tensor, torch.clone, tuple(args))


def _rope_in_place():
    q, k = torch.randn(2, 4, 6, 8, device="mps"), torch.randn(2, 2, 6, 8, device="mps")
    cos, sin = torch.randn(2, 1, 1, 6, 8, device="mps")
    torch.ops.metalcore.rope_(q, k, cos, sin, None, 1, 8, False, 0, 0, False)


def _scaled_factors():
    torch.ops.metalcore.qr_scaled(torch.randn(3, 5, 4, device="mps"))


def _least_squares_without_gradients():
    _scaled_factors()
    A, B = torch.randn(2, 3, 5, 4, device="mps")
    metalcore.lstsq(A, B)
    metalcore.lstsq(A, B, driver="gelsy")


def _loss_of_each_row():
    hidden, weight = (torch.randn(rows, 6, device="mps", requires_grad=True) for rows in (4, 7))
    target = torch.randint(0, 7, (4,), device="mps")
    loss = metalcore.fused_linear_cross_entropy(hidden, weight, target, reduction="none")
    torch.autograd.grad(loss, (hidden, weight), torch.randn_like(loss))


def _attention_without_gradients():
    metalcore.scaled_dot_product_attention(*torch.randn(3, 2, 4, 6, 8, device="mps"), is_causal=True)


def _layer_norm_without_gradients():
    x, weight = torch.randn(3, 5, 4, device="mps"), torch.randn(4, device="mps")
    metalcore.layer_norm(x, (4,), weight)
    metalcore.add_layer_norm(x, x, weight)


# Calls of operators that samples do not reach, by their op.
MORE = {
    "fused_linear_cross_entropy": _loss_of_each_row,
    "layer_norm": _layer_norm_without_gradients,
    "add_layer_norm": _layer_norm_without_gradients,
    "lstsq": _least_squares_without_gradients,
    "scaled_dot_product_attention": _attention_without_gradients,
    "qr": _scaled_factors,
    "softmax": lambda: metalcore.softmax(torch.randn(3, 5, device="mps"), -1, temperature=2.0),
    "rope": _rope_in_place,
}


def _calls_of(op):
    """Calls of operators that samples of an op and their derivatives make."""
    calls = _Calls()
    samples = sorted((sample for sample in op.samples() if sample.elements), key=lambda sample: sample.elements)
    for sample in samples[:SAMPLES]:
        derived = op.backward and sample.backward
        tensors = [tensor.requires_grad_(derived) for tensor in sample.make("mps", torch.float32)]
        with calls, torch.autograd.set_multithreading_enabled(False):
            results = [result for result in op.compute(sample, tensors) if result.requires_grad]
            if results:
                torch.autograd.grad(results, tensors, [torch.randn_like(r) for r in results], allow_unused=True)
    with calls, torch.autograd.set_multithreading_enabled(False):
        MORE.get(op.name, lambda: None)()
    return calls.found


def _strategies(func, args, mesh):
    """The inputs' placements, by their names, of each way in which the rule lets the call run."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict.fromkeys(names) | dict(zip(names, args))
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            meta = TensorMeta(value.shape, value.stride(), value.dtype)
            given[name] = DTensorSpec(mesh, (Replicate(),), tensor_meta=meta)
    for _, placements in rules.RULES[func.overloadpacket.__name__](rules.Call(**given, operator=str(func))):
        yield {name: placement for name, placement in placements.items() if given[name] is not None}


def _placed(tensor, placement, mesh):
    if isinstance(placement, Partial):
        share = (0.25, 0.75)[dist.get_rank()]
        return DTensor.from_local(tensor * share, mesh, [placement], run_check=False)
    return distribute_tensor(tensor, mesh, [placement], src_data_rank=None)


def _difference(ours, theirs):
    """Of tensors, as a share of the largest number."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return f"{theirs.dtype} {tuple(theirs.shape)} in the place of {ours.dtype} {tuple(ours.shape)}"
    ours, theirs = ours.detach().cpu().double(), theirs.detach().cpu().double()
    size = ours[ours.isfinite()].abs().max().item() if ours.isfinite().any() else 1.0
    if not torch.allclose(theirs, ours, rtol=1e-4, atol=1e-4 * size, equal_nan=True):
        return f"differs by {(ours - theirs).abs().max().item():g}, of {size:g}"
    return None


def _wrong(func, args, kwargs, placements, mesh):
    """What is wrong with a call on shards, or None."""
    names = [argument.name for argument in func._schema.arguments]
    alone = _copies(args)
    expected = func(*alone, **kwargs)
    shards = [
        _placed(value.clone(), placements.get(name, Replicate()), mesh) if isinstance(value, torch.Tensor) else value
        for name, value in zip(names, args)
    ]
    with CommDebugMode() as communication:
        found = func(*shards, **kwargs)
    if communication.get_total_counts():
        return "communicates"
    pairs = list(zip(tree_leaves(expected), tree_leaves(found), strict=True))
    pairs += [(a, b) for a, b in zip(alone, shards) if isinstance(b, DTensor)]  # those that it writes to
    differences = [_difference(a, b.full_tensor()) for a, b in pairs if isinstance(a, torch.Tensor)]
    return next((difference for difference in differences if difference), None)


def values(ops):
    """(operators that were called, of those the ways in which they ran, and what was wrong) for some ops' samples."""
    mesh = init_device_mesh("mps", (dist.get_world_size(),))
    reached, ways, wrong = set(), 0, []
    for op in ops:
        for operator, calls in _calls_of(OPS[op]).items():
            reached.add(operator)
            for func, args, kwargs in calls[:SAMPLES]:
                given = dict(zip((argument.name for argument in func._schema.arguments), args))
                for placements in _strategies(func, args, mesh):
                    # DTensor does not shard what has fewer places than there are ranks.
                    if any(isinstance(p, Shard) and given[name].shape[p.dim] < 2 for name, p in placements.items()):
                        continue
                    ways += 1
                    found = _wrong(func, args, kwargs, placements, mesh)
                    if found:
                        wrong.append(f"{operator} of {op}, {placements}: {found}")
    return sorted(reached), ways, wrong
