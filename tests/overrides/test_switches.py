"""A switch is on while someone asks for it: nesting, repetition, switching everything off, threads. Those that are on
without their names were not measured to be slower."""

import json
import math
import re
import threading
from pathlib import Path

import pytest

import metalcore
from metalcore.overrides import _gains
from metalcore.overrides._switches import Switches


@pytest.fixture
def switches():
    return Switches("abc", lambda: None)


def test_nested_requests_end_one_by_one(switches):
    with switches.request(["a"]):
        with switches.request(["a", "b"]):
            assert switches.active() == ("a", "b")
        assert switches.active() == ("a",)
    assert switches.active() == ()


def test_a_block_inside_a_plain_request_leaves_it_on(switches):
    switches.request(["a"])
    with switches.request(["a"]):
        pass
    assert switches.active() == ("a",)


def test_clear_ends_everything_and_later_blocks_are_not_undone_twice(switches):
    switches.request(["a"])
    switches.request(["a"])
    outer = switches.request(["b"])
    switches.clear()
    assert switches.active() == ()
    switches.request(["b"])
    with outer:
        pass
    assert switches.active() == ("b",)


def test_a_block_left_by_an_exception_ends(switches):
    with pytest.raises(KeyError), switches.request(["c"]):
        raise KeyError
    assert switches.active() == ()


def test_leaving_twice_withdraws_once(switches):
    switches.request(["a"])
    block = switches.request(["a"])
    for _ in range(2):
        with block:
            pass
    assert switches.active() == ("a",)


def test_choose(switches):
    assert switches.choose("f", (), ()) == ["a", "b", "c"]
    assert switches.choose("f", ("c", "a"), ()) == ["a", "c"]
    assert switches.choose("f", (), "b") == ["a", "c"]
    with pytest.raises(ValueError, match="f: 'd' is not one of a, b, c"):
        switches.choose("f", ("d",), ())
    with pytest.raises(ValueError, match="'dd'"):
        switches.choose("f", (), "dd")


def test_threads_that_come_and_go_leave_nothing_on(switches):
    def come_and_go():
        for _ in range(300):
            with switches.request(["a", "c"]):
                assert "a" in switches.active()

    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert switches.active() == ()


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
NAMES = metalcore.overrides.NAMES


def measured():
    """The geometric means of each family's newest day of results on NVIDIA GPUs, by the first word of their cases."""
    days = {}
    for path in sorted(RESULTS.glob("*-nvidia-*.json")):
        for case in json.loads(path.read_text())["results"]:
            if case.get("speedup") and case["family"] not in ("call_overhead", "linalg_map"):
                days.setdefault(case["family"], {}).setdefault(path.name[:10], []).append(case)
    speedups = {}
    for by_day in days.values():
        for case in by_day[max(by_day)]:
            speedups.setdefault(re.split(r"[ ,]", case["name"])[0], []).append(median(case["speedup"]))
    return {name: math.exp(sum(map(math.log, of)) / len(of)) for name, of in speedups.items()}


def median(speedup):
    return speedup["median"] if isinstance(speedup, dict) else speedup if isinstance(speedup, float) else speedup[0]


def test_the_figures_are_those_of_the_results():
    expected = {name: value for name, value in measured().items() if name in NAMES}
    assert expected.keys() == _gains.GAINS["cuda"].keys()
    for name, value in expected.items():
        assert _gains.GAINS["cuda"][name] == pytest.approx(value, abs=0.006), name


def test_what_is_slower_is_off(device, monkeypatch):
    monkeypatch.setitem(_gains.GAINS, device, {"silu": 0.9, "gelu": 0.96})
    with metalcore.enable_pytorch_overrides():
        assert metalcore.active_overrides() == tuple(name for name in NAMES if name != "silu")
        rows = [row for row in metalcore.report().rows if row.what == f"silu on {device}"]
        assert [(row.replaced, list(row.left)) for row in rows] == [
            (False, ["slower there than PyTorch's own, and so not on by default"])
        ]
    with metalcore.enable_pytorch_overrides("silu"):
        assert metalcore.active_overrides() == ("silu",)
    with metalcore.enable_pytorch_overrides(exclude="gelu"):
        assert not {"silu", "gelu"} & set(metalcore.active_overrides())


def test_without_a_device_nothing_is_known():
    assert _gains.by_default("silu", {}, (2, 15), {}) is None and _gains.gain("silu", "mps") is None
