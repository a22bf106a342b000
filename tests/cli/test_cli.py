"""python -m metalcore: what it prints, and how it refuses."""

import json
import subprocess
import sys

import pytest

from metalcore.cli import main
from metalcore.cli.bench import ROOT

FAMILIES = {"activation", "adamw", "rms_norm", "softmax"}


def run(capsys, *arguments):
    status = main(list(arguments))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_info(capsys):
    status, out, err = run(capsys, "info")
    assert (status, err) == (0, "")
    for section in ("versions", "devices", "backends", "kernels", "compiler", "cache"):
        assert f"\n{section}\n" in "\n" + out


def test_info_json(device, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("METALCORE_CACHE_DIR", str(tmp_path / "cache"))
    found = json.loads(run(capsys, "info", "--json")[1])
    assert found["cache"]["directory"] == str(tmp_path / "cache")
    assert FAMILIES <= set(found["kernels"])
    built_for = "cuda" if device == "cuda" else "checking"
    assert all(entry["kernels"] > 0 and built_for in entry["built for"] for entry in found["kernels"].values())


def test_info_without_a_compiler(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    found = json.loads(run(capsys, "info", "--json")[1])
    assert found["compiler"]["found"] is None
    assert "g++" in found["compiler"]["why"]


def test_explain(capsys):
    import metalcore

    status, out, err = run(capsys, "explain", "qr", "1024", "128", "128")
    assert (status, err) == (0, "")
    assert out.strip() == str(metalcore.explain("qr", (1024, 128, 128)))
    out = run(capsys, "explain", "softmax", "8", "64", "--dtype", "bfloat16", "--option", "dim=0")[1]
    assert "bfloat" in out


@pytest.mark.parametrize("arguments, message", (
    (("explain", "nope", "3"), "'nope'"),
    (("explain", "qr", "4", "x"), "'4 x'"),
    (("explain", "qr", "4", "-4"), "negative"),
    (("explain", "qr", "4"), "at least 2 dimensions"),
    (("explain", "qr", "4", "4", "--option", "mode"), "NAME=VALUE"),
    (("explain", "qr", "4", "4", "--option", "mode=x"), "mode"),
))
def test_refusals(capsys, arguments, message):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert "Traceback" not in err and message in err


@pytest.mark.parametrize("arguments", (
    (), ("nope",), ("explain",), ("info", "extra"), ("explain", "qr", "2", "--dtype", "x")))
def test_usage_errors(capsys, arguments):
    with pytest.raises(SystemExit) as error:
        main(list(arguments))
    assert error.value.code == 2
    assert "usage: metalcore" in capsys.readouterr().err


def test_as_a_module():
    found = subprocess.run([sys.executable, "-m", "metalcore", "--help"], capture_output=True, text=True, cwd=ROOT)
    assert found.returncode == 0
    assert all(word in found.stdout for word in ("info", "explain", "bench"))
