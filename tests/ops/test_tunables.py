"""With every legal value of every tunable field the ops are right: no measured value can make a result wrong."""

import pytest
import torch
from rows import tuned

from metalcore import _C
from metalcore._core import accuracy
from metalcore._core.registry import OPS
from metalcore.tuning import workloads

EVERYWHERE = [0, 2**63 - 1, 1, 2**63 - 1]


def tunables(device):
    """Those of the baseline, whose plans use all kernels; the simulator's own use few."""
    with tuned("baseline"):
        return _C.tunables(device)


def extremes(entry):
    """The lowest and the highest legal value."""
    return [[], EVERYWHERE] if entry["kind"] == "regions" else [[entry["lowest"]], [entry["highest"]]]


@pytest.fixture
def use(device):
    """Plans with these values, and with the baseline's for all other fields."""
    if device == "cpu":
        pytest.skip("the CPU has no tuning")
    family = _C.gpu_family(device)

    def use(values):
        baseline = {(entry["table"], entry["field"]): entry["value"] for entry in tunables(device)}
        _C.use_measured(device, family, [(*name, value) for name, value in {**baseline, **values}.items()])

    yield use
    _C.use_measured(device, family, [])


def planned(device, names=OPS):
    """(op, sample, the plans of its passes) of the samples of these ops, with the values in use."""
    for op in map(OPS.__getitem__, names):
        for sample in filter(lambda sample: sample.elements, op.samples()):
            # The derivatives of other ops are made of ops.
            own = any(operator.endswith("_backward") for operator in op.operators)
            passes = [False, True] if own and sample.backward else [False]
            plans = [workloads.Workload(op.name, sample, 0, 0, backward).plan(device) for backward in passes]
            yield op, sample, (op.name, sample.name, *plans)


@pytest.fixture(scope="module")
def seen():
    """Plans that ran before. Those of the baseline have tests of their own."""
    return set()


@pytest.fixture
def wrong(device, use, seen):
    """The samples that are wrong with the values in use, of those with new plans."""

    def wrong(names=OPS):
        found = []
        for op, sample, key in planned(device, names):
            if key not in seen:
                seen.add(key)
                try:
                    shares = accuracy.shares(op, sample, device, torch.float32)
                    right = all(share <= 1 for share in shares.values())
                except Exception as error:  # a kernel that refuses the value; the report names it
                    shares, right = error, False
                if not right:
                    found.append((op.name, sample.name, shares))
        return found

    if not seen:
        use({})
        seen |= {key for _, _, key in planned(device)}
    return wrong


def test_every_extreme_is_right(device, use, seen, wrong):
    """In the ops that a table is measured with. All extremes together are tried with those that call them as well."""
    faults, before = {}, len(seen)
    entries = tunables(device)
    measured = {
        table: {call.op for call in workloads.workloads(table, workloads.SIMULATED)}
        for table in {entry["table"] for entry in entries}
    }
    for entry in entries:
        for value in extremes(entry):
            use({(entry["table"], entry["field"]): value})
            if found := wrong(measured[entry["table"]]):
                faults[f"{entry['table']}.{entry['field']} = {value}"] = found
    assert not faults
    assert len(seen) > before + 60  # the values do make other plans


@pytest.mark.parametrize("end", [0, 1])
def test_all_extremes_together_are_right(device, use, wrong, end):
    use({(entry["table"], entry["field"]): extremes(entry)[end] for entry in tunables(device)})
    assert not wrong()


def test_every_table_has_calls_to_time(device, use):
    entries = tunables(device)
    for table in {entry["table"] for entry in entries}:
        calls = workloads.workloads(table, workloads.SIMULATED)
        plans = set()
        for end in (0, -1):  # a baseline may leave all of them to PyTorch, as syrk's does on NVIDIA GPUs
            use({(table, entry["field"]): extremes(entry)[end] for entry in entries if entry["table"] == table})
            plans |= {call.plan(device) for call in calls}
        assert len(plans) > 1, table
        use({})
        for call in {(call.op, call.backward): call for call in calls}.values():
            call.call(device)()


def test_present_values_are_legal(device, use):
    for family in _C.tuning_families():
        with tuned(family):
            values = [(entry["table"], entry["field"], entry["value"]) for entry in _C.tunables(device)]
        _C.use_measured(device, _C.gpu_family(device), values)
        assert [entry["value"] for entry in _C.tunables(device)] == [value for _, _, value in values]


def test_values_beyond_the_legal_ones_are_refused(device, use):
    before = _C.tunables(device)
    for entry in before:
        if entry["kind"] == "regions":
            bad = [[1], [5, 5, 1, 1], [-1, 5, 1, 1], [0, 5, 0, 1], [0, 5, 2, 1], EVERYWHERE * 4]
        else:
            bad = [[], [entry["lowest"] - 1], [entry["highest"] + entry["step"]], [entry["lowest"]] * 2]
            bad += [[entry["lowest"] + 1]] if entry["step"] > 1 else []
        for value in bad:
            with pytest.raises(ValueError, match=rf"{entry['table']}\.{entry['field']}: "):
                _C.use_measured(device, _C.gpu_family(device), [(entry["table"], entry["field"], value)])
    for name in (("rows", "length"), ("columns", "thread_row")):
        with pytest.raises(ValueError, match="there is no such"):
            _C.use_measured(device, _C.gpu_family(device), [(*name, [1])])
    assert _C.tunables(device) == before


def test_measured_values_are_for_their_family_only(device, use):
    _C.use_measured(device, "another", [("rows", "looped_threads", [64])])
    assert not any(entry["measured"] for entry in _C.tunables(device))
    _C.use_measured(device, _C.gpu_family(device), [("rows", "looped_threads", [64])])
    values = {(entry["table"], entry["field"]): entry for entry in _C.tunables(device)}
    assert values["rows", "looped_threads"]["value"] == [64]
    assert values["rows", "looped_threads"]["measured"] and not values["lu", "torch"]["measured"]
