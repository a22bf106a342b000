"""python -m metalcore: what it prints, how it refuses, and what it says of a program's file."""

import json
import sys
from pathlib import Path

import pytest
import torch
from processes import python
from torch import nn

import metalcore
from metalcore.cli import explain, main
from metalcore.programs.files.container import Container, write

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = {"activation/softmax", "attention/forward", "normalization/rms_norm", "optim/adamw"}


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
    assert set(found["kernels"]) >= FAMILIES
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
    out = run(capsys, "explain", "svd", "4x8x8", "--dtype", "complex64")[1]
    assert out.strip() == str(metalcore.explain("svd", (4, 8, 8), dtype=torch.complex64)) and "complex" in out
    out = run(capsys, "explain", "softmax", "8", "64", "--dtype", "bfloat16", "--option", "dim=0")[1]
    assert "bfloat" in out


@pytest.mark.parametrize(
    "words, shapes",
    (
        (["1024x128x128"], [(1024, 128, 128)]),
        (["8x8", "8x3"], [(8, 8), (8, 3)]),
        (["8x8,", "8x3"], [(8, 8), (8, 3)]),
        (["8", "8,8", "3"], [(8, 8), (8, 3)]),
        (["0x4"], [(0, 4)]),
    ),
)
def test_shapes(words, shapes):
    assert explain.shape_words(words) == shapes


def test_explain_for_programs(capsys):
    import metalcore

    status, out, err = run(capsys, "explain", "solve", "64x32x32", "64x32x4", "--json")
    assert (status, err) == (0, "")
    found, expected = json.loads(out), metalcore.explain("solve", (64, 32, 32), (64, 32, 4))
    assert (found["op"], found["variant"], found["why"]) == (expected.op, expected.variant, expected.why)
    assert [step["kernel"] for step in found["steps"]] == [step.kernel for step in expected.steps]
    assert found["steps"][0].keys() == {"kernel", "grid", "threadgroup", "threads"}


def test_explain_for_a_device(capsys, device):
    name = "simulator" if "metalcore.simulator" in sys.modules else device
    if device == "cpu":
        pytest.skip("PyTorch's own ops run there")
    by_default = run(capsys, "explain", "qr", "8x8")[1]
    assert run(capsys, "explain", "qr", "8x8", "--device", name)[:2] == (0, by_default)


@pytest.mark.only_on("simulator")
@pytest.mark.parametrize("command", (["explain", "qr", "8x8"], ["selftest"], ["bench", "qr"]))
@pytest.mark.parametrize("name", ("mps", "cuda"))
def test_a_device_that_is_not_there(capsys, command, name):
    status, out, err = run(capsys, *command, "--device", name)
    assert (status, out) == (2, "")
    assert f"--device {name}: PyTorch" in err and err.count("\n") == 1


def test_version(capsys):
    import torch

    import metalcore

    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(
        f"metalcore {metalcore.__version__}, PyTorch {torch.__version__}, Python 3."
    )


@pytest.mark.parametrize(
    "arguments, message",
    (
        (("explain", "nope", "3"), "'nope'"),
        (("explain", "qr", "4", "x"), "'x'"),
        (("explain", "qr", "4", "-4"), "negative"),
        (("explain", "qr", "4"), "at least 2 dimensions"),
        (("explain", "qr", "4", "4", "--option", "mode"), "NAME=VALUE"),
        (("explain", "qr", "4", "4", "--option", "mode=x"), "mode"),
        (("explain", "softmax", "8x8", "--option", "dtype=float16"), "the command has its own argument dtype"),
        (("explain", "qr", "4x"), "'4x'"),
        (("explain", "qr", "4xx4"), "'4xx4'"),
        (("explain", "qr", "four"), "'four'"),
        (("explain", "qr", "4.5x4"), "whole numbers"),
        (("explain", "qr", "99999999999999999999x4"), "below 2^63"),
        (("explain", "softmax", "9223372036854775807x9223372036854775807"), "Storage size calculation overflowed"),
        (
            ("explain", "softmax", "8x8", "--option", "dim=99999999999999999999"),
            "softmax does not take these arguments",
        ),
        (("check", "no_such_file.metal"), "no_such_file.metal: No such file"),
        (("check", "."), ".: Is a directory"),
        (("check", __file__, "-I", "no_such_folder"), "no_such_folder"),
        (("bench", "--report", "no_such_file.json"), "no_such_file.json"),
    ),
)
def test_refusals(capsys, arguments, message):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert message in err and err.startswith(f"metalcore {arguments[0]}: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    (
        (),
        ("nope",),
        ("explain",),
        ("info", "extra"),
        ("explain", "qr", "2", "--dtype", "x"),
        ("explain", "qr", "2x2", "--device", "cpu"),
        ("bench", "--rounds", "0"),
        ("bench", "--rounds", "9" * 30),
        ("bench", "--threads", "-1"),
        ("bench", "--threads", "1e3"),
    ),
)
def test_usage_errors(capsys, arguments):
    with pytest.raises(SystemExit) as error:
        main(list(arguments))
    assert error.value.code == 2
    assert "usage: metalcore" in capsys.readouterr().err


def test_as_a_module():
    found = python("-m", "metalcore", "--help", cwd=ROOT)
    assert found.returncode == 0
    assert all(word in found.stdout for word in ("info", "explain", "bench"))


@pytest.fixture(scope="module")
def file(device, tmp_path_factory):
    """A program, in a file."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("programs") / "linear.mcore"
    program = metalcore.compile(nn.Linear(3, 2).to(device), (torch.ones(1, 3).to(device),))
    program.save(path, weights="apart")
    return path, program


@pytest.fixture
def where(device):
    return ["--device", "cuda" if device == "cuda" else "mps" if torch._C._has_mps and not simulated() else "simulator"]


def simulated():
    return getattr(torch._C, "_metalcore_simulates_mps", False)


def test_describe(file, capsys):
    path, _ = file
    assert main(["program", "describe", str(path)]) == 0
    assert "aten::linear" in capsys.readouterr().out
    assert main(["program", "describe", str(path), "--manifest"]) == 0
    assert json.loads(capsys.readouterr().out)["weights"] == "linear.safetensors"


def test_run(file, where, capsys, tmp_path, device):
    path, program = file
    (name,) = program.inputs
    write(tmp_path / "inputs", {name: torch.full((1, 3), 2.0)}, {})
    results = tmp_path / "results.safetensors"
    assert main(["program", "run", str(path), *where, "--inputs", str(tmp_path / "inputs"), "-o", str(results)]) == 0
    assert "result_0: float32 1×2" in capsys.readouterr().out
    with Container(results) as found:
        assert torch.equal(found.read("result_0"), program(torch.full((1, 3), 2.0).to(device)).cpu())
    texts = []
    for seed in ("1", "1", "2"):
        main(["program", "run", str(path), *where, "--seed", seed])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_profile(file, where, capsys, tmp_path):
    path, _ = file
    picture = tmp_path / "a.svg"
    assert main(["program", "profile", str(path), *where, "--repeats", "1", "-o", str(picture), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["operations"] and picture.read_text().startswith("<svg")


def test_what_is_no_program_is_refused(capsys, tmp_path):
    (tmp_path / "a.mcore").write_text("no program")
    assert main(["program", "describe", str(tmp_path / "a.mcore")]) == 2
    assert "no file of this kind" in capsys.readouterr().err
    assert main(["program", "describe", str(tmp_path / "none")]) == 2
