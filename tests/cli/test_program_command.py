"""python -m metalcore program."""

import json

import pytest
import torch
from torch import nn

import metalcore
from metalcore.cli import main
from metalcore.programs.files.container import Container, write


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
