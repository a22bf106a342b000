"""The reports of metalcore bench, made of known figures. Git has the pictures that pages show and no others, and no
HTML: a run's JSON file gives both again."""

import os
import re
import sys
from pathlib import Path

import pytest

from metalcore.cli import main

pytestmark = pytest.mark.usefixtures("as_before")


def known():
    result = {
        "family": "qr",
        "name": "qr",
        "shape": "4x4",
        "dtype": "float32",
        "method": "events",
        "calls": 2,
        "sets": 1,
        "cached": False,
        "variant": "simd",
        "ours": {"q1": 0.9e-3, "median": 1e-3, "q3": 1.1e-3},
        "theirs": {"q1": 2, "median": 2.5, "q3": 3},
        "speedup": {"q1": 2000, "median": 2500, "q3": 3000},
        "bytes": 10**9,
        "flops": 0,
        "limit": 5e-4,
        "bound": "memory",
        "bytes_per_second": 1e12,
        "share": 0.5,
        "targets": [
            {"quantity": "speedup", "bound": 1500, "found": 2500, "met": True},
            {"quantity": "share", "bound": 0.8, "found": 0.5, "met": False},
        ],
        "samples": {"ours": [1e-3], "theirs": [2.5]},
    }
    met = {**result, "shape": "5x5", "targets": result["targets"][:1]}
    failed = {"family": "softmax", "name": "a|b", "shape": "", "dtype": "", "error": "ValueError: <no>\nmore"}
    return {
        "machine": {"date": "2026-01-02T03:04:05+00:00", "device_name": "NVIDIA H100 80GB", "torch": "2.11"},
        "ceilings": {"copy": 2e12, "matmul_float32": 5e13, "matmul_bfloat16": 7e14},
        "settings": {"rounds": 31, "quick": False, "eager": False},
        "results": [result, met, failed],
    }


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
    assert "http" not in page and "src=" not in page  # the page needs no other file


def test_numbers():
    from benchmarks.harness.report import rate_text, seconds_text

    assert [seconds_text(seconds) for seconds in (1234.5, 0.99999, 0.0123, 4.56e-5, 1e-8, -2e-6)] == [
        "1234 s",
        "1 s",
        "12.3 ms",
        "45.6 us",
        "0.01 us",
        "-2 us",
    ]
    assert [rate_text(rate, "B/s") for rate in (2.976e12, 999.9e9, 123.45e9, 5e3)] == [
        "2.98 TB/s",
        "1 TB/s",
        "123 GB/s",
        "0.005 MB/s",
    ]


def test_report_of_a_json_file(capsys, tmp_path):
    from benchmarks.harness import report

    files = report.Files(tmp_path / "first", "run")
    files.write_json(known())
    assert report.load(tmp_path / "first" / "run.json") == known()
    assert main(["bench", "--report", str(tmp_path / "first" / "run.json"), "--out", str(tmp_path / "second")]) == 0
    assert "MISS" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "second").iterdir()} >= {"run.json", "run.md", "run.html"}
    assert (tmp_path / "second" / "run.md").read_text() == report.markdown(
        known(), {path.stem.removeprefix("run-"): path for path in (tmp_path / "second").glob("*.png")}
    )


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
    assert plots.draw("qr", results[:2], known()["machine"], tmp_path / "qr.png")
    assert (tmp_path / "qr.png").read_bytes().startswith(b"\x89PNG")
    assert not plots.draw("softmax", results[2:], known()["machine"], tmp_path / "softmax.png")  # nothing was measured
    assert "data:image/png;base64," in report.page(known(), {"qr": tmp_path / "qr.png"})


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    from benchmarks.harness import report

    assert [path.suffix for path in report.Files(tmp_path, "run").write_reports(known())] == [".json", ".md", ".html"]


def test_report_refuses_other_json(capsys, tmp_path):
    (tmp_path / "x.json").write_text("[1]")
    assert main(["bench", "--report", str(tmp_path / "x.json")]) == 2
    assert "not the JSON file of a benchmark" in capsys.readouterr().err


def drawn(results, machine, tmp_path, monkeypatch):
    """The matplotlib figure of a family's picture."""
    figure = pytest.importorskip("matplotlib.figure")
    from benchmarks.harness import plots

    figures = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, path, **options: figures.append(self))
    assert plots.draw("qr", results, machine, tmp_path / "qr.png")
    return figures[0]


def test_a_picture_says_what_it_shows(tmp_path, monkeypatch):
    data = known()
    figure = drawn(data["results"][:2], data["machine"], tmp_path, monkeypatch)
    times, shares = figure.axes
    assert times.get_xscale() == "log" and not times.patches  # a logarithmic axis has no zero where bars could begin
    assert all(axes.get_xlabel() for axes in figure.axes) and times.get_ylabel() == "case"
    assert [text.get_text() for text in times.texts] == ["2500×"] * 2
    assert [text.get_text() for text in shares.texts] == ["50", "0.02"] * 2  # ours, and PyTorch's 0.5 ms of 2.5 s
    assert figure.get_supxlabel() == "NVIDIA H100 80GB, PyTorch 2.11, 2026-01-02"
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {"metalcore", "PyTorch", "physical limit"}


ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def pictures(folder):
    """The paths of the pictures that a folder's pages show."""
    return {
        (folder / name).resolve()
        for page in folder.glob("*.md")
        for name in re.findall(r"!\[[^\]]*\]\(([^)]*)\)", page.read_text())
    }


@pytest.mark.skipif(
    not RESULTS.exists() and not os.environ.get("CI"), reason="a source distribution, which has no results"
)
def test_pages_show_all_pictures_that_are_kept_and_no_others():
    kept = {*RESULTS.glob("*.png")}
    assert pictures(RESULTS) == kept
    assert kept <= pictures(ROOT / "docs"), "a picture is large: only what a page explains is worth it"
    assert not [*RESULTS.glob("*.html")]
