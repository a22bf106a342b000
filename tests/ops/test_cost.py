"""Numbers of machines: no dispatch keeps the slowest GPU for long, and tuning numbers that depend on a GPU's cores."""

import pytest
import torch
from rows import tuned

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


# By table and field, on the 132 multiprocessors of an H100 or H200.
HOPPER = {
    "parallelism.fill_threadgroups": 264,
    "attention_decode.fill_threadgroups": 396,
    "attention_decode.fill_matrices": 264,
    "gemm.large_tiles": 64,
    "gemm.unit_threadgroups": 132,
    "joined_linear.fill_simdgroups": 4096,
    "triangular.panel_threadgroups": 1024,
    "triangular.threadgroups": 256,
    "triangular.vector_batch": 264,
    "quant.mv_threadgroups": 512,
    "rows.row_threads": 135168,
}
SIMULATOR = {
    "parallelism.fill_threadgroups": 2,
    "attention_decode.fill_threadgroups": 2,
    "attention_decode.fill_matrices": 2,
    "gemm.large_tiles": 64,
    "joined_linear.fill_simdgroups": 1024,
    "triangular.panel_threadgroups": 1024,
    "triangular.threadgroups": 256,
    "triangular.vector_batch": 264,
    "quant.mv_threadgroups": 512,
    "rows.row_threads": 65536,
}
APPLE = [family for family in _C.tuning_families() if family.startswith("apple")]
pytestmark = pytest.mark.only_on("simulator")  # other devices know their GPU's cores


def entries(family):
    with tuned(family):
        return {f"{entry['table']}.{entry['field']}": entry for entry in _C.tunables("mps")}


@pytest.mark.parametrize(("family", "expected"), [("hopper", HOPPER), ("simulator", SIMULATOR)])
def test_what_was_measured_is_as_it_was(family, expected):
    found = entries(family)
    assert {name: found[name]["value"] for name in expected} == {name: [value] for name, value in expected.items()}


@pytest.mark.parametrize("family", ["baseline", *APPLE])
def test_without_the_gpu_there_are_eight_cores(family):
    found = [entry for entry in entries(family).values() if entry["per_core"]]
    assert len(found) > 10 and all(entry["value"] == [8 * entry["per_core"]] for entry in found)


def test_the_values_of_the_largest_gpu_are_legal():
    """80 cores, as an Ultra has."""
    for name, entry in entries("baseline").items():
        if entry["per_core"]:
            assert entry["lowest"] <= entry["per_core"] and 80 * entry["per_core"] <= entry["highest"], name


def test_a_measured_value_does_not_depend_on_cores(device):
    _C.use_tuning("")  # measured values are for the device's own family
    _C.use_measured(device, _C.gpu_family(device), [("gemm", "large_tiles", [7])])
    try:
        found = {(entry["table"], entry["field"]): entry for entry in _C.tunables(device)}["gemm", "large_tiles"]
        assert found["value"] == [7] and found["per_core"] == 0
    finally:
        _C.use_measured(device, "", [])
