"""python -m metalcore selftest passes where the ops are right, and names those that are wrong."""

import dataclasses
import json

import pytest
import torch

import metalcore
from metalcore._core.registry import OPS
from metalcore.cli import devices, main

KINDS = {("mps", True): "mps", ("mps", False): "simulator", ("cuda", False): "cuda"}


@pytest.fixture
def kind(device):
    if device == "cpu":
        pytest.skip("there is no selftest of the CPU")
    return KINDS[device, device == "mps" and torch._C._has_mps and not hasattr(torch._C, "_metalcore_simulates_mps")]


def run(capsys, kind, *options):
    status = main(["selftest", "--device", kind, *options])
    return status, capsys.readouterr().out


def test_passes(kind, capsys):
    status, out = run(capsys, kind, "--json")
    found = json.loads(out)
    assert status == 0, found["summary"]
    assert found["machine"]["device"].startswith(kind)
    assert {check["status"] for check in found["checks"]} == {"ok"}
    tried = {check["name"].split(", ")[0] for check in found["checks"]}
    assert tried >= set(OPS)
    assert len(found["checks"]) >= sum(len(op.samples()) * len(op.dtypes) for op in OPS.values()) + 3


@pytest.fixture
def few(monkeypatch):
    for name in OPS.keys() - {"silu", "rms_norm"}:
        monkeypatch.delitem(OPS, name)


def replace(monkeypatch, name, function):
    """Replaces the function of an op."""
    monkeypatch.setitem(OPS, name, dataclasses.replace(OPS[name], function=function))


def names(op, *dtypes):
    """The names of an op's checks that compare something. Samples without elements have nothing to compare."""
    samples = (sample for sample in OPS[op].samples() if sample.elements)
    return {f"{op}, golden artifacts", *(f"{op}, {sample.name}, {dtype}" for sample in samples for dtype in dtypes)}


def failures(out):
    return {line.split("] ")[1][9:].split("  ")[0] for line in out.splitlines() if "] FAILED" in line}


def test_a_wrong_result_is_named(kind, few, capsys, monkeypatch):
    replace(monkeypatch, "silu", lambda x: metalcore.silu(x) * (1 + 2**-5))
    status, out = run(capsys, kind)
    expected = names("silu", "float32", "float16", "bfloat16")
    assert status == 1
    assert failures(out) == expected
    assert f"{len(expected)} FAILED: silu, " in out.splitlines()[-1]


def test_a_wrong_gradient_is_named(kind, few, capsys, monkeypatch):
    # The difference is zero, and its derivative adds 0.25.
    replace(monkeypatch, "silu", lambda x: metalcore.silu(x) + (x - x.detach()) * 0.25)
    status, out = run(capsys, kind)
    assert status == 1 and failures(out) == names("silu", "float32", "float16", "bfloat16")
    assert all("gradient" in line for line in out.splitlines() if "] FAILED" in line)


def test_checks_are_counted(kind, few, capsys):
    lines = [line for line in run(capsys, kind)[1].splitlines() if line.startswith("[")]
    count = len(lines)
    assert count >= 8 and [line[1:].split("]")[0].strip() for line in lines] == [
        f"{number}/{count}" for number in range(1, count + 1)
    ]


def test_nan_and_exceptions_fail(kind, few, capsys, monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("no such kernel")

    replace(monkeypatch, "silu", lambda x: x * float("nan"))
    replace(monkeypatch, "rms_norm", broken)
    status, out = run(capsys, kind)
    both = (names(op, "float32", "float16", "bfloat16") for op in ("silu", "rms_norm"))
    assert status == 1 and failures(out) == set().union(*both)
    assert out.count("RuntimeError: no such kernel") == len(names("rms_norm", "float32", "float16", "bfloat16"))


def test_faulty_shaders_are_noticed(kind, few, capsys, monkeypatch):
    monkeypatch.setattr(metalcore, "compile_shader", lambda source: None)
    assert failures(run(capsys, kind)[1]) == {"compile_shader", "compile_shader refuses a faulty program"}


@pytest.mark.only_on("simulator")
def test_the_simulator_is_the_default_without_a_gpu():
    assert devices.default() == "simulator"
