"""The cost model: no dispatch keeps the slowest GPU for long, and a long op has many dispatches."""

import pytest
import torch

import metalcore
from metalcore import _C
from metalcore._core.registry import OPS
from metalcore.recording import on_meta

MOST = 0.2  # seconds: kMostSeconds of csrc/gpu/cost.h


@pytest.fixture(autouse=True)
def tuning():
    _C.use_tuning("baseline")
    yield
    _C.use_tuning("")


def seconds(function, *shapes, device="mps", **options):
    with on_meta(device) as recorder, torch.no_grad():
        function(*(torch.empty(shape, device="meta") for shape in shapes), **options)
    return [dispatch.seconds for dispatch in recorder.recording.dispatches]


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_samples_are_short(op):
    for sample in op.samples():
        tensors = sample.make("meta", torch.float32)
        with on_meta("mps") as recorder, torch.no_grad():
            op.call(op.function, *sample.arguments(*tensors), **sample.options)
        times = [dispatch.seconds for dispatch in recorder.recording.dispatches]
        assert all(0 < time < 0.01 for time in times), sample.name


LARGE = [
    (metalcore.svd, (2048, 2048), 5),
    (metalcore.svd, (100_000, 64, 64), 5),
    (metalcore.svdvals, (16, 1024, 1024), 5),
    (metalcore.eigh, (100, 2048, 2048), 20),
    (metalcore.eigh, (4096, 4096), 2),
    (metalcore.eigh, (1_000_000, 32, 32), 5),
    (metalcore.qr, (8192, 8192), 2),
    (metalcore.qr, (1_000_000, 64), 0.05),
    (metalcore.qr, (100_000, 128, 128), 1),
    (metalcore.cholesky_ex, (8192, 8192), 0.3),
    (metalcore.cholesky_ex, (1_000_000, 64, 64), 0.5),
    (metalcore.lu_factor_ex, (8192, 8192), 1),
    (metalcore.lu_factor_ex, (100_000, 128, 128), 0.5),
    (metalcore.inv_ex, (200_000, 64, 64), 0.3),
    (metalcore.syrk, (8192, 8192), 1),
    (metalcore.silu, (4_000_000_000,), 0.5),
]


@pytest.mark.parametrize("function, shape, least", LARGE, ids=lambda value: getattr(value, "__name__", str(value)))
def test_no_dispatch_of_a_large_op_is_long(function, shape, least):
    times = seconds(function, shape)
    assert max(times) <= MOST and sum(times) >= least


def test_large_systems_are_split():
    for order, columns, batch in ((8192, 8192, 1), (128, 128, 100_000)):
        times = seconds(metalcore.solve_triangular, (batch, order, order), (batch, order, columns), upper=True)
        assert max(times) <= MOST and sum(times) > 2 * MOST


def test_only_macs_split_batches():
    for function in (metalcore.svd, metalcore.qr):
        few, many = (len(seconds(function, (batch, 64, 64), device="cuda")) for batch in (10, 1_000_000))
        assert few == many < len(seconds(function, (1_000_000, 64, 64)))


def test_more_work_takes_longer():
    assert sum(seconds(metalcore.silu, (10**8,))) > 5 * sum(seconds(metalcore.silu, (10**7,)))
    assert sum(seconds(metalcore.eigh, (1, 1024, 1024))) > 4 * sum(seconds(metalcore.eigh, (1, 512, 512)))


def test_a_single_threadgroup_has_one_core_only():
    one, seven = (sum(seconds(metalcore.qr, (batch, 128, 128))) for batch in (1, 7))
    assert seven < 1.5 * one
