"""Tuning numbers that depend on the number of a GPU's cores: those of hopper and of the simulator are what was measured
on an H100 and chosen for the simulator, and Apple's grow with the cores."""

import pytest
from rows import tuned

from metalcore import _C

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
    _C.use_measured(device, _C.gpu_family(device), [("gemm", "large_tiles", [7])])
    try:
        found = {(entry["table"], entry["field"]): entry for entry in _C.tunables(device)}["gemm", "large_tiles"]
        assert found["value"] == [7] and found["per_core"] == 0
    finally:
        _C.use_measured(device, "", [])
