"""metalcore bench: one tiny case of every family, what is written of it, its arithmetic; no time is judged."""

import argparse
import json
import re
import sys

import pytest
import torch

import metalcore
from metalcore.cli import main
from metalcore.cli.bench import ROOT, run


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    """The threads and the path of this process, which a run sets."""
    monkeypatch.syspath_prepend(str(ROOT))
    threads = torch.get_num_threads()
    simulator = metalcore._C.simulator_info()["threads"] if hasattr(metalcore._C, "simulator_info") else None
    yield
    torch.set_num_threads(threads)
    if simulator:
        metalcore._C.simulator_set_num_threads(simulator)


@pytest.fixture
def bench(capsys, device, tmp_path):
    """bench(*arguments): its exit status, stdout, stderr and the data of its JSON file, on the tests' device."""
    name = "cpu" if "metalcore.simulator" in sys.modules else device

    def call(*arguments):
        status = main(["bench", "--device", name, "--out", str(tmp_path), *arguments])
        captured = capsys.readouterr()
        files = list(tmp_path.glob("*.json"))
        return status, captured.out, captured.err, json.loads(files[0].read_text()) if files else None

    return call


SMALL = {
    "activation": "gelu tanh backward bfloat16",
    "adamw": "float32",
    "call_overhead": "rms_norm",
    "cholesky": "8x8x8",
    "compile": "compile_shader",
    "eigh": "8x8x8",
    "householder": "geqrf",
    "import_time": "metalcore",
    "linalg_map": "svd_lowrank",
    "lu": "det",
    "qr": "8x8x8",
    "rms_norm": "add_rms_norm forward float16",
    "softmax": "log_softmax backward float32",
    "solve_triangular": "8x8x8",
    "spectral": "matrix_rank",
    "svd": "8x8x8",
}


def test_every_family_has_a_small_case():
    from benchmarks.harness.run import families

    assert families() == sorted(SMALL)


@pytest.mark.parametrize("family", sorted(SMALL))
def test_family(bench, tmp_path, family):
    status, out, err, data = bench(family, "--quick", "--filter", SMALL[family])
    assert status == 0, err
    assert data["results"] and {result["family"] for result in data["results"]} == {family}
    for result in data["results"]:
        assert "error" not in result and result["ours"]["q1"] <= result["ours"]["median"] <= result["ours"]["q3"]
        assert 0 < result["ours"]["median"] and len(result["samples"]["ours"]) > 0
        assert ("speedup" in result) == ("theirs" in result) == bool(result["samples"]["theirs"])
        for text in (out, *(path.read_text() for path in tmp_path.iterdir() if path.suffix in (".md", ".html"))):
            assert result["name"] in text and (result["shape"] in text or "cell" in result)
    assert f"[1/{len(data['results'])}] {family}: " in err
    assert {path.suffix for path in tmp_path.iterdir()} >= {".json", ".md", ".html"}


def test_the_machine_is_described(bench):
    data = bench("qr", "--quick", "--commit", "abc", "--rounds", "4", "--filter", "8x8x8")[3]
    assert data["machine"]["torch"] == torch.__version__ and data["machine"]["commit"] == "abc"
    assert data["machine"].keys() >= {"date", "device_name", "python", "platform", "metalcore"}
    assert all(rate > 0 for rate in data["ceilings"].values())
    assert len(data["results"][0]["samples"]["ours"]) == data["settings"]["rounds"] == 4


def test_a_process_that_fails():
    from benchmarks.harness.process import python

    assert python("-c", "import os; print(os.environ['NAME'])", NAME="x") == "x\n"
    with pytest.raises(RuntimeError, match="a new process failed: ValueError: no\n"):
        python("-c", "raise ValueError('no')")
    with pytest.raises(RuntimeError, match="a new process failed: exit status 3"):
        python("-c", "import os; os._exit(3)")


def test_a_case_that_raises_is_shown_and_fails(bench, monkeypatch):
    monkeypatch.setattr(torch.linalg, "qr", lambda a: 1 / 0)
    status, out, err, data = bench("qr", "--quick")
    assert status == 1
    assert [result["error"] for result in data["results"]] == ["ZeroDivisionError: division by zero"] * 2
    assert "2 cases failed" in out and "ZeroDivisionError" in out and "Traceback" in err


def test_lists(capsys):
    from benchmarks.harness.run import families

    assert main(["bench", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == families()
    assert main(["bench", "--list", "qr"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "qr             qr 1024x128x128 float32" in lines
    assert main(["bench", "--list", "--filter", "RMS bfloat16 backward"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines and all("rms_norm" in line and "bfloat16" in line and "backward" in line for line in lines)


@pytest.mark.parametrize("arguments, message", (
    (("nope",), "'nope' is not a benchmark; there are activation, adamw"),
    (("--list", "nope"), "'nope' is not a benchmark"),
    (("--list", "--filter", "nope"), "no case contains 'nope'"),
    (("--report", "nowhere.json"), "--report nowhere.json: "),
))
def test_refusals(capsys, arguments, message):
    assert main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err


def test_report_refuses_other_json(capsys, tmp_path):
    (tmp_path / "x.json").write_text("[1]")
    assert main(["bench", "--report", str(tmp_path / "x.json")]) == 2
    assert "not the JSON file of a benchmark" in capsys.readouterr().err


@pytest.mark.parametrize("name", ("cuda", "mps"))
def test_a_device_that_is_not_there(capsys, name):
    if "metalcore.simulator" not in sys.modules:
        pytest.skip("there is a GPU")
    assert main(["bench", "qr", "--device", name]) == 2
    assert "--device cpu runs on the simulated device" in capsys.readouterr().err


def test_an_installed_package_has_no_benchmarks(monkeypatch, tmp_path):
    monkeypatch.setattr("metalcore.cli.bench.BENCHMARKS", tmp_path / "benchmarks")
    with pytest.raises(ValueError, match="come with the source checkout"):
        run(argparse.Namespace())


# A report of figures that are known


def known():
    result = {"family": "qr", "name": "qr", "shape": "4x4", "dtype": "float32", "method": "events", "calls": 2,
              "sets": 1, "cached": False, "variant": "simd", "ours": {"q1": 0.9e-3, "median": 1e-3, "q3": 1.1e-3},
              "theirs": {"q1": 2, "median": 2.5, "q3": 3}, "speedup": {"q1": 2000, "median": 2500, "q3": 3000},
              "bytes": 10**9, "flops": 0, "limit": 5e-4, "bound": "memory", "bytes_per_second": 1e12, "share": 0.5,
              "targets": [{"quantity": "speedup", "bound": 1500, "found": 2500, "met": True},
                          {"quantity": "share", "bound": 0.8, "found": 0.5, "met": False}],
              "samples": {"ours": [1e-3], "theirs": [2.5]}}
    met = {**result, "shape": "5x5", "targets": result["targets"][:1]}
    failed = {"family": "softmax", "name": "a|b", "shape": "", "dtype": "", "error": "ValueError: <no>\nmore"}
    return {"machine": {"date": "2026-01-02T03:04:05+00:00", "device_name": "NVIDIA H100 80GB", "torch": "2.11"},
            "ceilings": {"copy": 2e12, "matmul_float32": 5e13, "matmul_bfloat16": 7e14},
            "settings": {"rounds": 31, "quick": False, "eager": False}, "results": [result, met, failed]}


ROW = ["qr [simd]", "4x4", "float32", "1 ms", "2.5 s", "2500 (2000 to 3000)", "1 TB/s", "50.0%", "MISS share >= 80.0%"]


def test_formats():
    from benchmarks.harness import report

    data = known()
    text = report.text(data)
    assert "\nqr, measured by events\n" in text
    assert "  ".join(ROW) in re.sub(" {3,}", "  ", text) and "2 of 3 targets met, 1 cases failed" in text
    markdown = report.markdown(data, {})
    assert f"| {' | '.join(ROW)} |" in markdown and "| a\\|b |" in markdown and "| pass |" in markdown
    page = report.page(data, {})
    assert '<td class="miss">MISS share &gt;= 80.0%</td>' in page and "&lt;no&gt;" in page and "<no>" not in page
    assert "http" not in page and "src=" not in page  # needs no other file


def test_numbers():
    from benchmarks.harness.report import rate_text, seconds_text

    assert [seconds_text(seconds) for seconds in (1234.5, 0.99999, 0.0123, 4.56e-5, 1e-8, -2e-6)] == [
        "1234 s", "1 s", "12.3 ms", "45.6 us", "0.01 us", "-2 us"]
    assert [rate_text(rate, "B/s") for rate in (2.976e12, 999.9e9, 123.45e9, 5e3)] == [
        "2.98 TB/s", "1 TB/s", "123 GB/s", "0.005 MB/s"]


def test_report_of_a_json_file(capsys, tmp_path):
    from benchmarks.harness import report

    files = report.Files(tmp_path / "first", "run")
    files.write_json(known())
    assert report.load(tmp_path / "first" / "run.json") == known()
    assert main(["bench", "--report", str(tmp_path / "first" / "run.json"), "--out", str(tmp_path / "second")]) == 0
    assert "MISS" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "second").iterdir()} >= {"run.json", "run.md", "run.html"}
    assert (tmp_path / "second" / "run.md").read_text() == report.markdown(known(), {
        path.stem.removeprefix("run-"): path for path in (tmp_path / "second").glob("*.png")})


def test_report_of_several_files(capsys, tmp_path):
    from benchmarks.harness import report

    first, second, other = known(), known(), known()
    del second["results"][0]
    second["results"][0]["ours"]["median"] = 7e-3
    second["results"][1]["family"] = "adamw"
    other["machine"]["torch"] = "2.12"
    for name, data in (("a", first), ("b", second), ("c", other)):
        report.Files(tmp_path, name).write_json(data)
    paths = [str(tmp_path / f"{name}.json") for name in "abc"]
    assert main(["bench", "--report", *paths[:2]]) == 0
    found = report.load(tmp_path / "2026-01-02-nvidia-h100-80gb.json")["results"]
    assert [result["family"] for result in found] == ["adamw", "qr", "qr", "softmax"]
    assert [result["ours"]["median"] for result in found[1:3]] == [1e-3, 7e-3]
    capsys.readouterr()
    assert main(["bench", "--report", *paths]) == 2
    assert "the runs differ in torch: 2.11, 2.12" in capsys.readouterr().err


def test_plots(tmp_path):
    from benchmarks.harness import plots, report

    results = known()["results"]
    assert plots.draw("qr", results[:2], tmp_path / "qr.png")
    assert (tmp_path / "qr.png").read_bytes().startswith(b"\x89PNG")
    assert not plots.draw("softmax", results[2:], tmp_path / "softmax.png")  # nothing was measured
    assert "data:image/png;base64," in report.page(known(), {"qr": tmp_path / "qr.png"})


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    from benchmarks.harness import report

    assert [path.suffix for path in report.Files(tmp_path, "run").write_reports(known())] == [".json", ".md", ".html"]


# Arithmetic


def test_quartiles():
    from benchmarks.harness.summary import quartiles, speedup

    assert quartiles([5.0]) == {"q1": 5.0, "median": 5.0, "q3": 5.0}
    assert quartiles([4, 1, 3, 2, 5]) == {"q1": 2, "median": 3, "q3": 4}
    assert quartiles([1, 2, 3, 4]) == {"q1": 1.75, "median": 2.5, "q3": 3.25}
    assert speedup([1, 2, 4], [10, 10, 10]) == {"q1": 3.75, "median": 5, "q3": 7.5}


def test_rates_and_limits():
    from benchmarks.harness.case import Comparison
    from benchmarks.harness.summary import limit, rates

    ceilings = {"copy": 100.0, "matmul_float32": 1000.0}
    assert limit(200, 1000, ceilings) == (2.0, "memory")
    assert limit(200, 3000, ceilings) == (3.0, "arithmetic")
    assert limit(0, 0, ceilings) == (None, None)
    case = Comparison(name="x", inputs=None, ours=None, theirs=None, bytes=200, flops=1000)
    assert rates(case, 4.0, False, ceilings) == {"bytes": 200, "flops": 1000, "limit": 2.0, "bound": "memory",
                                                 "bytes_per_second": 50.0, "flops_per_second": 250.0, "share": 0.5}
    assert "share" not in rates(case, 4.0, True, ceilings)  # from the cache


def test_targets():
    from benchmarks.harness.summary import check

    result = {"ours": {"median": 2.0}, "speedup": {"median": 1.5}, "share": 0.8}
    assert check(result, "speedup", 1.5)["met"] and not check(result, "speedup", 1.6)["met"]
    assert check(result, "share", 0.8)["met"] and not check(result, "share", 0.81)["met"]
    assert check(result, "seconds", 2.0)["met"] and not check(result, "seconds", 1.9)["met"]
    assert check(result, "overhead", 1.0) == {"quantity": "overhead", "bound": 1.0, "found": None, "met": False}
    with pytest.raises(ValueError, match="'time' is not a target"):
        check(result, "time", 1)


def test_qr_counts():
    """LAPACK's counts (Working Note 41) for sgeqrf and sorgqr, to the leading order."""
    from benchmarks.families.qr import householder_flops, least_bytes

    n = 300
    assert householder_flops((5, n, n)) == 5 * round(8 / 3 * n**3)
    assert householder_flops((2 * n, n)) == round(4 * 2 * n * n**2 - 4 / 3 * n**3)
    assert householder_flops((n, 2 * n)) == round(2 * n**2 * 2 * n - 2 / 3 * n**3 + 4 / 3 * n**3)
    assert least_bytes((5, 6, 4)) == 5 * 4 * (6 * 4 + 6 * 4 + 4 * 4)


# Measuring


def test_inputs_take_turns():
    from benchmarks.harness.measure import in_turns, input_sets

    assert [input_sets(bytes_, 50) for bytes_ in (0, 1, 40, 100, 200, 201)] == [1, 64, 5, 2, 1, 1]
    assert input_sets(100, 0) == 1  # a device without a known cache
    made = []
    calls = [lambda name=name: made.append(name) or made[-1] for name in "abc"]
    in_turns(calls, 5)()
    assert "".join(made) == "abcab"


def test_results_are_kept_for_a_turn():
    """So that a call's output does not lie where the one before left it in the cache."""
    import weakref

    from benchmarks.harness.measure import in_turns

    class Result:
        pass

    alive, seen = weakref.WeakSet(), []

    def call():
        seen.append(len(alive))
        result = Result()
        alive.add(result)
        return result

    in_turns([call, call], 5)()
    assert seen == [0, 1, 2, 2, 2]


class Clock:
    """A device on which every call takes 1 ms, and capturing is possible."""

    lead_in, graphs = True, True

    def __init__(self):
        self.now, self.captures = 0.0, 0

    def call(self):
        self.now += 1e-3

    def synchronize(self):
        pass

    def seconds(self, batch):
        begin = self.now
        batch()
        return self.now - begin

    def capture(self, batch):
        self.captures += 1
        return batch


def runner(device, **settings):
    from benchmarks.harness.run import Run

    return Run(**{"device": device, "rounds": 5, "quick": False, "eager": False, "sample_seconds": 4e-3,
                  "case_seconds": 1.0, **settings})


@pytest.mark.parametrize("graph", (False, True))
def test_samples_are_long_enough(graph):
    from benchmarks.harness.measure import Side

    device = Clock()
    side = Side([device.call, device.call, device.call], runner(device), graph)
    assert side.calls == 6  # the least multiple of 3 that takes 4 ms
    assert side.sample() == pytest.approx(1e-3)
    assert device.captures == (2 if graph else 0)


def test_slow_calls_take_fewer_sets():
    from benchmarks.harness.measure import Side

    device, made = Clock(), []

    def call(name):
        made.append(name)
        device.now += 0.12

    side = Side([lambda name=name: call(name) for name in "abcd"], runner(device), False)
    assert side.sets == side.calls == 2 and set(made) == {"a", "b"}


def test_sides_alternate():
    from benchmarks.harness.measure import Side, alternate

    device, order = Clock(), []

    def side(name, milliseconds):
        def call():
            order.append(name)
            device.now += milliseconds * 1e-3

        return Side([call], runner(device, sample_seconds=0), False)

    sides = [side("a", 30), side("b", 60)]  # too long for a batch ahead of the measured one
    order.clear()
    ours, theirs = alternate(sides, runner(device))
    assert "".join(order) == "abbaabbaab"
    assert ours == pytest.approx([0.03] * 5) and theirs == pytest.approx([0.06] * 5)
    assert len(alternate(sides, runner(device, case_seconds=0.28))[0]) == 3  # as many as fit, but three at least
    assert len(alternate(sides, runner(device, case_seconds=0.4))[0]) == 4
