"""Every operator of the registry has a rule for DTensor."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import metalcore
from metalcore._core.registry import OPS
from metalcore.distributed import mps
from metalcore.distributed.rules import RULES

NAMES = [name.removeprefix("metalcore::") for name in torch._C._dispatch_get_all_op_names()
         if name.startswith("metalcore::") and not name.startswith("metalcore::_")]  # fmt: skip
# Operators that run on no shards: DTensor gathers their inputs.
REPLICATED = {"blocks", "embedding_bag_samples"}
# Operators that take no DTensors at all.
REFUSED = {"cross_entropy_", "cross_entropy_ahead", "cross_entropy_finish_", "divergence_", "scale_", "update_8bit_"}


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield init_device_mesh("mps", (2, 2))
    dist.destroy_process_group()


@pytest.mark.parametrize("op", OPS)
def test_every_op_of_the_registry_has_rules(op):
    assert set(OPS[op].operators) <= RULES.keys()


def test_rules_are_of_operators():
    assert set(NAMES) == RULES.keys()


def test_what_runs_on_no_shards():
    empty = {rule.__name__ for rule in RULES.values() if rule.__name__ in REPLICATED}
    refused = {name for name, rule in RULES.items() if rule.__name__ == "refuse"}
    assert (empty, refused) == (REPLICATED, REFUSED)


def sharded(mesh, *placements, shape=(8, 16, 12, 12)):
    return distribute_tensor(torch.randn(shape, device="mps"), mesh, placements)


BOTH = (Shard(0), Shard(1))
HEADS = (Shard(0), Shard(2))  # of attention along time


@pytest.mark.parametrize(
    "call, kept",
    [
        (lambda x: metalcore.silu(x), (Shard(2), Shard(3))),
        (lambda x: metalcore.softmax(x, -1), BOTH),
        (lambda x: metalcore.swiglu(x, x), (Shard(3), Shard(0))),
        (lambda x: metalcore.scaled_dot_product_attention(x, x, x), BOTH),
        (lambda x: metalcore.layer_norm(x, (12,)), (Shard(1), Shard(2))),
        (lambda x: metalcore.qr(x)[1], BOTH),
        (lambda x: metalcore.qr(x, mode="r")[1], BOTH),
        (lambda x: metalcore.svd(x)[0], BOTH),
        (lambda x: metalcore.eigvalsh(x), BOTH),
        (lambda x: metalcore.solve_triangular(x, x, upper=True), BOTH),
        (lambda x: metalcore.syrk(x), BOTH),
        (lambda x: metalcore.chunk_gated_delta_rule(x, x, x, x[..., 0], x[..., 1])[0], HEADS),
        (lambda x: torch.autograd.grad(metalcore.chunk_gated_delta_rule(x.requires_grad_(), x, x)[0], x, x)[0], HEADS),
        (lambda x: metalcore.chunk_kda(x, x, x, x, x[..., 1])[0], HEADS),
        (lambda x: torch.autograd.grad(metalcore.chunk_gla(x.requires_grad_(), x, x, x)[0], x, x)[0], HEADS),
    ],
    ids=range(15),
)
def test_shards_stay_without_communication(mesh, call, kept):
    x = sharded(mesh, *kept)
    with CommDebugMode() as communication:
        found = call(x)
    assert found.placements == kept and communication.get_total_counts() == 0


def test_linear_operators_keep_partial_sums(mesh):
    x = sharded(mesh, Shard(0), Replicate())
    grad = torch.distributed.tensor.DTensor.from_local(torch.ones_like(x.to_local()), mesh, [Shard(0), Partial()])
    with CommDebugMode() as communication:
        found = torch.ops.metalcore.silu_backward(grad, x)
    assert found.placements == (Shard(0), Partial()) and communication.get_total_counts() == 0


def test_rows_that_are_sharded_are_gathered(mesh):
    x = sharded(mesh, Shard(3), Shard(0))
    with CommDebugMode() as communication:
        found = metalcore.softmax(x, -1)
    assert found.placements == (Replicate(), Shard(0)) and communication.get_total_counts() == 1


def test_the_cached_decision_is_that_of_the_mode(mesh):
    x = sharded(mesh, *BOTH, shape=(8, 16, 12, 6))
    assert [metalcore.qr(x, mode=mode)[0].shape[-2:] for mode in ("reduced", "complete")] == [(12, 6), (12, 12)]


def test_operators_that_dtensor_would_misread_say_so(mesh):
    x = sharded(mesh, Shard(0), Replicate(), shape=(4, 4))
    with pytest.raises(RuntimeError, match="takes no DTensors"):
        torch.ops.metalcore.scale_(x, x)


def test_an_argument_that_is_written_stays_where_it_is(mesh):
    q, k = (sharded(mesh, placement, Replicate(), shape=(2, 4, 6, 8)) for placement in (Shard(1), Shard(3)))
    cos = sharded(mesh, Replicate(), Replicate(), shape=(1, 1, 6, 8))
    with pytest.raises(RuntimeError, match="cannot write to its arguments as they are placed"):
        torch.ops.metalcore.rope_(q, k, cos, cos, None, 1, 8, False, 0, 0, False)


def test_collectives_are_those_that_pytorch_has():
    found = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if "c10d::" in name}
    assert found - set(mps.OPERATORS) == {"check_for_nan", "monitored_barrier_"}
