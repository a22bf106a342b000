"""python -m metalcore tune: what it measures, the file it writes, and which files later processes use."""

import json
import subprocess
import sys
import warnings

import pytest

import metalcore
from metalcore import _C
from metalcore._core.environment import switched_on
from metalcore.cli import info, main, tune
from metalcore.overrides import _gains
from metalcore.overrides import _timing as overrides
from metalcore.tuning import search, store, workloads
from metalcore.tuning.search import Timing


@pytest.fixture
def gpu(device, tmp_path, monkeypatch):
    """The GPU at hand, with an empty cache directory."""
    if device == "cpu":
        pytest.skip("the CPU has no tuning")
    monkeypatch.setenv("METALCORE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("METALCORE_TUNING")
    monkeypatch.setattr(store, "_state", {})
    yield store.this_gpu(device)
    _C.use_measured(device, "", [])


def value(gpu, name):
    return {tunable.name: tunable.value for tunable in search.tunables(gpu.device_type)}[name]


def run(gpu, *words):
    simulated = gpu.device_type == "mps" and gpu.name.startswith("simulator")
    return main(["tune", "--device", "simulator" if simulated else gpu.device_type, "--quick", *words])


# ---------------------------------------------------------------- the search


class Clock:
    """Says how long a call takes from the value of one field. It notes what it was asked."""

    def __init__(self, gpu, name, seconds):
        self.asked = []
        self._value = lambda: value(gpu, name)
        self._seconds = seconds

    def time(self, call):
        self.asked.append(self._value())
        return Timing(self._seconds(self.asked[-1]), 0.01)


def tuned(gpu, name, seconds, values):
    """The outcome for a field, and the clock."""
    store.use(gpu, values)
    tunable = next(tunable for tunable in search.tunables(gpu.device_type) if tunable.name == name)
    calls = workloads.workloads(tunable.table, workloads.SIMULATED)[::3]
    clock = Clock(gpu, name, seconds)
    return search.Search(gpu, clock, values).tune(tunable, calls), clock


LOOPED = {"rows.thread_row": 0, "rows.simd_row": 0, "rows.block_row": 0, "rows.looped_threads": 512}


def test_the_fastest_value_is_found(gpu):
    outcome, clock = tuned(gpu, "rows.looped_threads", lambda threads: 1 + abs(threads - 64) / 1000, LOOPED)
    assert outcome.value == value(gpu, "rows.looped_threads") == 64
    assert outcome.changed and outcome.gain == pytest.approx(1 - 1 / 1.448)
    assert len(set(clock.asked)) > 5


def test_a_gain_within_the_noise_changes_nothing(gpu):
    outcome, _ = tuned(gpu, "rows.looped_threads", lambda threads: 1 if threads == 64 else 1.02, LOOPED)
    assert outcome.value == value(gpu, "rows.looped_threads") == 512 and not outcome.changed
    assert "noise" in outcome.note


def test_a_gain_that_does_not_show_again_changes_nothing(gpu):
    _, clock = tuned(gpu, "rows.looped_threads", lambda threads: 1, LOOPED)
    once, seen = clock.asked.count(64), []

    def seconds(threads):
        seen.append(threads)
        return 0.5 if threads == 64 and seen.count(64) <= once else 1

    outcome, _ = tuned(gpu, "rows.looped_threads", seconds, LOOPED)
    assert not outcome.changed and "noise" in outcome.note and seen.count(64) > once > 0


def test_each_plan_is_timed_once(gpu):
    outcome, clock = tuned(gpu, "rows.simd_row", lambda row: 1, {"rows.thread_row": 0, "rows.block_row": 0})
    assert not outcome.changed and outcome.calls > 4
    # A call is a simdgroup's or a threadgroup's, whatever the value.
    assert len(clock.asked) <= 3 * outcome.calls


def test_a_field_that_no_plan_depends_on_is_not_timed(gpu):
    outcome, clock = tuned(gpu, "rows.block_row", lambda row: 1, {"rows.thread_row": 2**32 - 1})
    assert outcome.calls == 0 and clock.asked == []


def test_regions_are_where_the_others_are_faster(gpu):
    calls = [workloads.Workload("cholesky", None, size, batch) for batch in (1, 8, 100) for size in (32, 64, 128)]

    def fitted(ours, theirs, present=()):
        timings = [[Timing(side(call.size, call.batch), 0) for call in calls] for side in (ours, theirs)]
        return search.fit_regions(calls, *timings, list(present))

    assert fitted(lambda n, batch: 1, lambda n, batch: 2) == []
    assert fitted(lambda n, batch: 2, lambda n, batch: 1) == [[0, None, 1, None]]
    assert fitted(lambda n, batch: n, lambda n, batch: 50 * batch) == [[32, None, 1, 1]]
    assert fitted(lambda n, batch: n * batch, lambda n, batch: 100 if batch < 50 else 1e9) == [
        [64, None, 1, 1],
        [0, None, 2, 16],
    ]
    # Nothing larger was timed.
    present = [[512, None, 1, 1], [1024, None, 1, None], [4, 8, 1, None]]
    assert fitted(lambda n, batch: 1, lambda n, batch: 2, present) == [[512, None, 1, 1], [1024, None, 2, None]]
    store.use(gpu, {"cholesky.torch": fitted(lambda n, batch: 1, lambda n, batch: 2, present)})


def test_an_op_that_pytorch_lacks_is_never_the_fastest(gpu):
    class Lacking(Clock):
        def time(self, call):
            if value(gpu, "cholesky.torch"):
                raise NotImplementedError("aten::linalg_cholesky_ex")
            return Timing(1.0, 0.01)

    store.use(gpu, {"cholesky.torch": []})
    tunable = next(t for t in search.tunables(gpu.device_type) if t.name == "cholesky.torch")
    found = search.Search(gpu, Lacking(gpu, "cholesky.torch", None), {"cholesky.torch": []})
    outcome = found.tune(tunable, workloads.workloads("cholesky", workloads.SIMULATED))
    assert outcome.value == [] and outcome.calls > 0


def test_calls_stop_at_the_deadline(gpu):
    store.use(gpu, LOOPED)
    tunable = next(t for t in search.tunables(gpu.device_type) if t.name == "rows.looped_threads")
    clock = Clock(gpu, "rows.looped_threads", lambda threads: 1)
    outcome = search.Search(gpu, clock, LOOPED).tune(tunable, workloads.workloads("rows", workloads.SIMULATED), 0.0)
    assert clock.asked == [] and outcome.value == 512 and "no time" in outcome.note


# ---------------------------------------------------------------- the command


def test_it_measures_writes_and_shares(gpu, capsys):
    assert run(gpu, "--only", "softmax", "--only", "triangular.vector_batch", "--share") == 0
    out = capsys.readouterr().out
    found = json.loads(gpu.path.read_text())
    assert str(gpu.path) in out and found["identity"]["GPU"] == gpu.name
    assert "rows.thread_row" in found["values"] and "lu.torch" not in out
    shared = out[out.index(f"Tuning of {gpu.name}") :]
    assert metalcore.__version__ in shared and "| rows.thread_row | " in shared
    assert str(gpu.path.parent) not in shared  # nothing of the user's own
    assert str(gpu.path) in info.collect()["tuning"][gpu.device_type]
    _C.use_measured(gpu.device_type, "", [])
    store.load(gpu.device_type)
    assert {name: value(gpu, name) for name in found["values"]} == found["values"]


def test_overrides_are_measured_and_decide(gpu, capsys, monkeypatch):
    """A file's gains count for the PyTorch with which they were measured."""
    seconds = iter([3.0, 1.0, 1.0, 4.0])  # PyTorch's time and ours: in inference, and in training
    monkeypatch.setattr(search.Clock, "time", lambda clock, call: (call(), Timing(next(seconds), 0.01))[1])
    assert run(gpu, "--only", "overrides.silu", "--share") == 0
    out = capsys.readouterr().out
    assert "overrides.silu" in out and "3.00 times as fast as PyTorch's in inference, 0.25 times in training" in out
    assert "| silu | 3.00 | 0.25 |" in out
    assert store.gains(gpu.device_type) == {"silu": (3.0, 0.25)}
    forward, _, backward = metalcore._core.registry.OPS["silu"].override
    figures = store.gains(gpu.device_type)
    assert _gains.why_off("silu", forward, "mps", (2, 15), figures) is None
    assert _gains.why_off("silu", backward, "mps", (2, 15), figures) == _gains.SLOWER
    store.save(gpu, {}, "2026-01-02", {"gelu": (0.5, 0.5)})
    with metalcore.enable_pytorch_overrides():
        assert "gelu" not in metalcore.active_overrides()
    monkeypatch.setattr("torch.__version__", "2.99.0")
    assert store.gains(gpu.device_type) == {}


def test_an_op_that_pytorch_lacks_is_a_gain(gpu, monkeypatch):
    def time(clock, call):
        raise NotImplementedError("aten::silu")

    monkeypatch.setattr(search.Clock, "time", time)
    found = overrides.measure("silu", gpu.device_type, search.Clock(gpu.device_type, 5, 0.002))
    assert (found.inference, found.training) == (overrides.MOST, overrides.MOST)


def test_every_override_can_be_measured(gpu):
    """Each in both ways, without being timed."""

    class Once:
        def time(self, call):
            call()
            return Timing(1.0, 0.0)

    for name in overrides.names():
        found = overrides.measure(name, gpu.device_type, Once())
        assert found.inference == 1.0 and found.training in (1.0, None), name


def test_ctrl_c_leaves_what_was_there(gpu, capsys, monkeypatch):
    def interrupted(clock, call):
        raise KeyboardInterrupt

    before = search.tunables(gpu.device_type)
    monkeypatch.setattr(search.Clock, "time", interrupted)
    assert run(gpu, "--only", "softmax") == 130
    assert "nothing was written" in capsys.readouterr().err and not gpu.path.exists()
    assert search.tunables(gpu.device_type) == before


def test_a_word_that_names_nothing_is_refused(gpu, capsys):
    assert run(gpu, "--only", "softmin") == 2
    err = capsys.readouterr().err
    assert "softmin" in err and "rows.thread_row" in err and not gpu.path.exists()


def test_only_keeps_what_was_measured_before(gpu, capsys):
    store.save(gpu, {"rows.looped_threads": 96}, "2026-01-02")
    assert run(gpu, "--only", "triangular.vector_batch") == 0
    found = json.loads(gpu.path.read_text())["values"]
    assert found["rows.looped_threads"] == 96 and len(found) == 2


def test_forget(gpu, capsys):
    store.save(gpu, {"rows.looped_threads": 96}, "2026-01-02")
    assert run(gpu, "--forget") == 0 and not gpu.path.exists()
    assert run(gpu, "--forget") == 0 and "nothing" in capsys.readouterr().out


# ---------------------------------------------------------------- the file


def explained(gpu):
    """What another process says of a softmax, and its warnings."""
    lines = (
        ("import metalcore.simulator\n" * gpu.name.startswith("simulator"))
        + "import metalcore\n"
        + f"print(metalcore.explain('softmax', __import__('torch').ones(8, 1000, device='{gpu.device_type}')).why)"
    )
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


def test_another_process_uses_it(gpu):
    store.save(gpu, {"rows.thread_row": 1000, "rows.block_row": 16384}, "2026-01-02")
    out, err = explained(gpu)
    assert "a row of 1000 (at most 1000) is one thread's work" in out and err == ""


def test_it_is_left_out_on_request(gpu, monkeypatch):
    monkeypatch.setattr(store, "_asked", set())
    store.save(gpu, {"rows.looped_threads": 96}, "2026-01-02")
    before = search.tunables(gpu.device_type)
    monkeypatch.setenv("METALCORE_TUNING", "0")
    store._load(gpu.device_type)
    assert search.tunables(gpu.device_type) == before and "METALCORE_TUNING=0" in store.state(gpu.device_type)
    monkeypatch.delenv("METALCORE_TUNING")
    store._load(gpu.device_type)
    assert value(gpu, "rows.looped_threads") == 96


def test_a_reason_names_this_machine(gpu):
    store.use(gpu, {"cholesky.torch": [[0, None, 1, None]]})
    found = metalcore.explain("cholesky", (8, 10, 10))
    assert found.variant == "torch" and "measured on this machine" in found.why


def changed(**changes):
    """A function that changes a file's content."""

    def change(text):
        content = json.loads(text)
        for name, new in changes.items():
            content[name] = {**content[name], **new} if isinstance(new, dict) else new
        return json.dumps(content)

    return change


DAMAGE = {
    "cut short": (lambda text: text[:100], "damaged"),
    "no JSON": (lambda text: "tuned", "damaged"),
    "a list": (lambda text: "[]", "damaged"),
    "another format": (changed(format=2), "damaged"),
    "another version": (changed(identity={"metalcore": "0.0.9"}), "metalcore 0.0.9"),
    "other kernels": (changed(identity={"kernels": "0123"}), "kernels 0123"),
    "another GPU": (changed(identity={"GPU": "Apple M9"}), "GPU Apple M9"),
    "another family": (changed(family="apple99"), "family 'apple99'"),
    "too large": (changed(values={"rows.looped_threads": 2048}), r"rows.looped_threads: \[2048\] is not"),
    "too small": (changed(values={"rows.simd_rows": 0}), r"rows.simd_rows: \[0\] is not"),
    "between steps": (changed(values={"rows.looped_threads": 100}), "in steps of 32"),
    "a fraction": (changed(values={"rows.looped_threads": 96.5}), "whole numbers"),
    "a boolean": (changed(values={"rows.simd_rows": True}), "whole numbers"),
    "beyond 64 bits": (changed(values={"rows.thread_row": 2**70}), "whole numbers"),
    "a region with its ends exchanged": (changed(values={"lu.torch": [[9, 5, 1, 1]]}), "lu.torch: region 1"),
    "a region of three numbers": (changed(values={"lu.torch": [[9, 10, 1]]}), "not a list of regions"),
    "a number for regions": (changed(values={"lu.torch": 9}), "lu.torch: 1 numbers"),
    "no such field": (changed(values={"rows.width": 9}), "rows.width: there is no such field"),
    "a gain that is no number": (changed(overrides={"gains": {"silu": ["fast", None]}}), "damaged"),
    "no such table": (changed(values={"columns": 9}), "there is no such table"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_is_not_right_is_not_used(gpu, damage):
    change, reason = DAMAGE[damage]
    before = search.tunables(gpu.device_type)
    store.save(gpu, {"rows.looped_threads": 96}, "2026-01-02")
    gpu.path.write_text(change(gpu.path.read_text()))
    with pytest.warns(RuntimeWarning, match=rf"is not used: .*{reason}.*metalcore tune"):
        store.load(gpu.device_type)
    assert search.tunables(gpu.device_type) == before
    assert "is not used" in info.collect()["tuning"][gpu.device_type]


def test_a_file_that_others_can_write_is_not_used(gpu):
    store.save(gpu, {"rows.looped_threads": 96}, "2026-01-02")
    gpu.path.chmod(0o666)
    with pytest.warns(RuntimeWarning, match="can be written by others"):
        store.load(gpu.device_type)


def test_without_a_file_nothing_is_said(gpu):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.load(gpu.device_type)
    assert info.collect()["tuning"][gpu.device_type] == store.FAMILY


def test_values_are_shown_in_words():
    assert search.text(512) == "512" and search.text(2**32 - 1) == "any" and search.text([]) == "nowhere"
    assert search.text([[0, None, 1, None]]) == "sizes above 0"
    regions = [[64, 128, 1, 1], [32, None, 2, 16], [8, None, 17, None]]
    assert search.text(regions) == ("1 of size above 64 up to 128; 2 to 16 of size above 32; from 17 of size above 8")
    outcome = search.Outcome(search.Tunable("lu", "torch", "regions", [], 0, 1, 1, False), regions, 0.25, 9)
    assert "nowhere -> 1 of size" in tune._line(outcome) and "25% less time" in tune._line(outcome)


@pytest.mark.parametrize("default", [False, True])
@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        *((text, True) for text in ("1", "on", "yes", "true", "True", "ON")),
        *((text, False) for text in ("0", "off", "no", "false", "False", "OFF")),
    ],
)
def test_settings(monkeypatch, setting, expected, default):
    monkeypatch.setenv("METALCORE_TUNING", setting)
    assert switched_on("METALCORE_TUNING", default) == expected == store.is_on()


def test_the_default(monkeypatch):
    monkeypatch.setenv("METALCORE_TUNING", "")
    assert store.is_on() and not switched_on("METALCORE_TUNING")
    monkeypatch.delenv("METALCORE_TUNING")
    assert store.is_on() and not switched_on("METALCORE_TUNING")


@pytest.mark.parametrize("setting", ["2", "enabled", " 1"])
def test_others_are_refused(monkeypatch, setting):
    monkeypatch.setenv("METALCORE_TUNING", setting)
    with pytest.raises(ValueError, match=f"METALCORE_TUNING must be 1, on, yes or true, or 0, .* got '{setting}'"):
        store.is_on()
