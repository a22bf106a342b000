"""The speed-up map of metalcore bench: which cells there are, how they are measured, how they are shown."""

import pytest
import torch

import metalcore
from metalcore.cli import main

pytestmark = pytest.mark.usefixtures("as_before")


def test_every_function_is_there():
    from benchmarks.families.linalg import linalg_map

    left_out = {"larfb", "larft", "multi_dot", "tensorinv", "tensorsolve"}
    assert not left_out & {*linalg_map.MAPPED} and len(linalg_map.MAPPED) >= len(metalcore.linalg.__all__) - 5
    assert {*linalg_map.ARGUMENTS, *linalg_map.BIND} <= set(linalg_map.MAPPED)


def test_cells():
    from benchmarks.families.linalg import linalg_map

    cells = linalg_map.linalg_map("gpu")
    assert {cell.n for cell in cells} == {4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048}
    assert {cell.batch for cell in cells} == {1, 16, 256, 4096, 16384}
    assert all(4 * cell.batch * cell.n**2 <= 1 << 30 for cell in cells)
    assert all(cell.targets == {"speedup": 1 / 1.1} for cell in cells)
    svd = [cell for cell in cells if cell.name == "svd"]
    assert [cell.shape for cell in svd[:2]] == ["4x4", "16x4x4"] and len(svd) == 42
    assert [(cell.n, cell.batch) for cell in svd] == sorted((cell.n, cell.batch) for cell in svd)
    assert svd[0].row is svd[4].row is not svd[5].row  # a row holds one n: times of 4 x 4 do not predict those of 8 x 8


def test_arguments_are_what_the_functions_take():
    """PyTorch's functions take the arguments, and factors belong to well-conditioned matrices."""
    from benchmarks.families.linalg import linalg_map

    for name, op in linalg_map.MAPPED.items():
        for shape in ((5, 5), (3, 5, 5)):
            arguments = linalg_map.arguments(name, torch.randn(shape))
            linalg_map.BIND.get(name, lambda function: function)(op.reference)(*arguments)
    A = torch.randn(3, 9, 9, dtype=torch.float64)
    Q = torch.linalg.householder_product(*linalg_map.reflectors(A))
    torch.testing.assert_close(Q.mT @ Q, torch.eye(9, dtype=torch.float64).expand(3, 9, 9))
    assert (torch.linalg.eigvalsh(linalg_map.positive(A)) >= 0.99).all()


class Clock:
    """A device whose calls take the time that they are told to take."""

    lead_in, graphs, method, ours, theirs = False, False, "events", "ours", "theirs"

    def __init__(self):
        self.now, self.calls = 0.0, []

    def session(self):
        import contextlib

        return contextlib.nullcontext()

    def call(self, side, seconds):
        self.calls.append(side)
        self.now += seconds

    def synchronize(self):
        pass

    def release(self):
        pass

    def seconds(self, batch):
        begin = self.now
        batch()
        return self.now - begin


def measured(ours, theirs, batches):
    """[(samples or why there are none, calls made)] of a row whose calls take ours(batch) and theirs(batch) seconds."""
    from benchmarks.harness.case import Cell, Row
    from benchmarks.harness.cells import Skipped, measure_cell
    from benchmarks.harness.run import Run

    device, row, found = Clock(), Row(), []
    run = Run(device, 31, False, False, sample_seconds=1e-3, case_seconds=4.0)
    for batch in batches:
        cell = Cell(
            name="x",
            n=4,
            batch=batch,
            row=row,
            inputs=lambda device: (),
            targets={},
            ours=lambda: device.call("ours", ours(batch)),
            theirs=lambda: device.call("theirs", theirs(batch)),
        )
        device.calls.clear()
        try:
            found.append((measure_cell(cell, run), list(device.calls)))
        except Skipped as reason:
            found.append((str(reason), list(device.calls)))
    return found


def test_quick_calls_are_measured_in_rounds():
    ((samples, _),) = measured(lambda batch: 1e-4, lambda batch: 3e-4, [1])
    assert samples.ours == pytest.approx([1e-4] * 7) and samples.theirs == pytest.approx([3e-4] * 7)
    assert samples.theirs_batch is None


def test_a_slow_call_is_measured_once():
    ((samples, calls),) = measured(lambda batch: 1e-4, lambda batch: 0.4, [1])
    assert samples.ours == pytest.approx([1e-4]) and samples.theirs == pytest.approx([0.4])
    assert calls.count("theirs") == 2


def test_pytorchs_time_is_multiplied_where_it_is_long():
    first, second, third = measured(lambda batch: 1e-4, lambda batch: batch * 1e-2, [16, 256, 4096])
    assert first[0].theirs == pytest.approx([0.16]) and first[0].theirs_batch is None
    for (samples, calls), seconds in ((second, 2.56), (third, 40.96)):
        assert samples.theirs == pytest.approx([seconds]) and samples.theirs_batch == 16
        assert samples.ours == pytest.approx([1e-4] * 7) and "theirs" not in calls


def test_what_would_take_us_long_is_left_out():
    _, second, third = measured(lambda batch: batch * 1e-2, lambda batch: 1e-3, [1, 16, 256])
    assert second[0].ours == pytest.approx([0.16])
    assert third == ("left out: 16 took 0.16 s", [])


def result(n, batch, ratio, **more):
    times = {"ours": 1e-3, "theirs": ratio * 1e-3, "speedup": ratio}
    return {
        "family": "linalg_map",
        "name": "svd",
        "shape": f"{batch}x{n}x{n}",
        "dtype": "float32",
        "method": "events",
        "cell": {"n": n, "batch": batch},
        "calls": 1,
        "sets": 1,
        "cached": False,
        "variant": "",
        **{name: dict.fromkeys(("q1", "median", "q3"), value) for name, value in times.items()},
        "targets": [{"quantity": "speedup", "bound": 1 / 1.1, "found": ratio, "met": ratio >= 1 / 1.1}],
        "samples": {"ours": [1e-3], "theirs": [ratio * 1e-3]},
        **more,
    }


def known():
    failed = {
        "family": "linalg_map",
        "name": "svd",
        "shape": "16x8x8",
        "dtype": "float32",
        "cell": {"n": 8, "batch": 16},
        "error": "ValueError: <no>",
    }
    return {
        "machine": {"date": "2026-01-02T03:04:05+00:00", "device_name": "NVIDIA H100 80GB", "torch": "2.11"},
        "ceilings": {"copy": 2e12, "matmul_float32": 5e13, "matmul_bfloat16": 7e14},
        "settings": {"rounds": 31, "quick": False, "eager": False},
        "results": [
            result(4, 1, 12.34),
            result(4, 16, 0.5),
            result(4, 256, 432.1, theirs_batch=16),
            result(8, 1, 1.0),
            failed,
        ],
    }


def test_formats():
    from benchmarks.harness import report

    text = report.text(known())
    lines = [line.split() for line in text.splitlines()]
    assert ["4", "12", "0.5", "~432"] in lines and ["8", "1", "error", "-"] in lines
    # Only results that missed the target or failed have a line of their own.
    assert sum("16x4x4" in line and "MISS speedup >= 0.909" in line for line in text.splitlines()) == 1
    assert "1x4x4" not in text and "ValueError: <no>" in text and "2 of 4" not in text and "3 of 4 targets met" in text
    markdown = report.markdown(known(), {})
    assert "| svd: n | batch 1 | batch 16 | batch 256 |" in markdown and "| 4 | 12 | 0.5 | ~432 |" in markdown
    page = report.page(known(), {})
    assert '<td style="background:#ffffff;color:black">1</td>' in page and "&lt;no&gt;" in page and "src=" not in page


def test_colours():
    from benchmarks.harness.maps import colour

    assert colour(result(4, 1, 1.0)) == "#ffffff"
    red, blue = colour(result(4, 1, 1e-9)), colour(result(4, 1, 1e9))
    assert red == colour(result(4, 1, 0.1)) == "#c0261c" and blue == colour(result(4, 1, 1000)) == "#4682c3"
    assert colour(None) == colour({"error": "x"}) == "#e1e1e1"


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.harness import plots

    assert plots.draw("linalg_map", known()["results"], known()["machine"], tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_lists(capsys):
    assert main(["bench", "--list", "linalg_map", "--filter", "svdvals 256x4x4"]) == 0
    assert capsys.readouterr().out == "linalg_map     svdvals 256x4x4 float32\n"


def test_a_picture_has_a_scale_and_can_be_read(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    from benchmarks.harness import plots

    figures = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, path, **options: figures.append(self))
    plots.draw("linalg_map", known()["results"], known()["machine"], tmp_path / "map.png")
    panel, scale = figures[0].axes
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("batch", "n")
    assert "PyTorch's time over metalcore's" in scale.get_ylabel()
    assert figures[0].get_supxlabel() == "NVIDIA H100 80GB, PyTorch 2.11, 2026-01-02"


@pytest.mark.parametrize("ratio", (0.01, 0.1, 0.3, 1, 3, 30, 200, 1000, 1e5))
def test_numbers_stand_out_from_their_cells(ratio):
    """The contrast is at least 4.5 to 1, which WCAG asks for small text."""
    from benchmarks.harness import maps

    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))

    face = maps.shade(ratio)
    light, dark = sorted((luminance(face), {"black": 0.0, "white": 1.0}[maps.ink(face)]), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 4.5
