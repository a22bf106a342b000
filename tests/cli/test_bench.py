"""metalcore bench: one tiny case of every family, and what the command refuses. No test judges a time."""

import argparse
import json
import sys
from types import ModuleType

import pytest
import torch

from metalcore.cli import main
from metalcore.cli.bench import run

pytestmark = pytest.mark.usefixtures("as_before")


@pytest.fixture
def bench(capsys, device, tmp_path):
    """bench(*arguments) -> exit status, stdout, stderr and the data of the JSON file, on the tests' device."""
    name = "simulator" if "metalcore.simulator" in sys.modules else device

    def call(*arguments):
        status = main(["bench", "--device", name, "--out", str(tmp_path), *arguments])
        captured = capsys.readouterr()
        files = list(tmp_path.glob("*.json"))
        return status, captured.out, captured.err, json.loads(files[0].read_text()) if files else None

    return call


SMALL = {
    "activation": "gelu tanh backward bfloat16",
    "adamw": "float32",
    "affine": "dequantize_affine",
    "attention": "forward causal bfloat16",
    "call_overhead": "rms_norm",
    "causal_conv1d": "channels last forward+backward bfloat16",
    "cholesky": "8x8x8",
    "compile": "compile_shader",
    "complex_linalg": "8x8x8",
    "conv": "residual relu channels_last float32",
    "decode": "bfloat16",
    "double": "mul",
    "eig": "8x8x8",
    "eigh": "8x8x8",
    "embedding": "embedding forward float32",
    "flex": "forward, causal",
    "four_bits": "dequantize_4bit",
    "gated": "silu_and_mul backward float16",
    "gated_delta_rule": "gated_delta_rule forward+backward bfloat16",
    "householder": "geqrf",
    "import_time": "metalcore",
    "layer_norm": "group_norm forward+backward float32",
    "linalg_map": "svd_lowrank",
    "lstsq": "2000x6",
    "loss": "cross_entropy forward bfloat16",
    "lu": "det",
    "matmul": "linear forward float32",
    "matrix_functions": "2x8x8",
    "optim": "soap",
    "pointwise": "gelu bfloat16",
    "programs": "resnet50 float32",
    "qr": "8x8x8",
    "replay": "inputs bound",
    "rms_norm": "add_rms_norm forward float16",
    "rope": "interleaved backward bfloat16",
    "scaled": "dequantize_scaled",
    "selective_scan": "selective_scan forward+backward bfloat16",
    "softmax": "log_softmax backward float32",
    "solve_triangular": "8x8x8",
    "spectral": "matrix_rank",
    "svd": "8x8x8",
    "train_step": "eager",
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
        assert result["ours"]["median"] > 0 and ("speedup" in result) == ("theirs" in result)
        for text in (out, *(path.read_text() for path in tmp_path.iterdir() if path.suffix in (".md", ".html"))):
            assert result["name"] in text and (result["shape"] in text or "cell" in result)
    assert f"[1/{len(data['results'])}] {family}: " in err
    assert {path.suffix for path in tmp_path.iterdir()} >= {".json", ".md", ".html"}


def test_the_machine_is_described(bench):
    data = bench("qr", "--quick", "--commit", "abc", "--rounds", "4", "--filter", "8x8x8")[3]
    assert data["machine"]["torch"] == torch.__version__ and data["machine"]["commit"] == "abc"
    assert data["machine"].keys() >= {"date", "device_name", "python", "platform", "metalcore"}
    assert all(rate > 0 for rate in data["ceilings"].values())
    assert data["settings"]["rounds"] == 4


def test_a_process_that_fails():
    from benchmarks.harness.machine import python

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


@pytest.mark.parametrize(
    "arguments, message",
    (
        (("nope",), "'nope' is not a benchmark; there are activation, adamw"),
        (("--list", "nope"), "'nope' is not a benchmark"),
        (("--list", "--filter", "nope"), "no case contains 'nope'"),
        (("--report", "nowhere.json"), "--report nowhere.json: "),
    ),
)
def test_refusals(capsys, arguments, message):
    assert main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err


@pytest.mark.parametrize("package", [None, ModuleType("benchmarks")], ids=["no package", "another package"])
def test_an_installed_metalcore_has_no_benchmarks(monkeypatch, package):
    monkeypatch.setitem(sys.modules, "benchmarks", package)
    monkeypatch.delitem(sys.modules, "benchmarks.harness", raising=False)
    with pytest.raises(ValueError, match="run the command in the folder of a source checkout"):
        run(argparse.Namespace())
