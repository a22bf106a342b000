"""python -m metalcore selftest: passes where the ops are right, and names what is not."""

import inspect
import json

import pytest
import torch

import metalcore
from metalcore.cli import devices, main, selftest
from metalcore.cli.selftest_cases import CASES, DTYPES

KINDS = {("mps", True): "mps", ("mps", False): "simulator", ("cuda", False): "cuda"}


@pytest.fixture
def kind(device):
    if device == "cpu":
        pytest.skip("there is no selftest of the CPU")
    return KINDS[device, device == "mps" and torch._C._has_mps and not hasattr(torch._C, "_metalcore_simulates_mps")]


def run(capsys, kind, *options):
    status = main(["selftest", "--device", kind, *options])
    return status, capsys.readouterr().out


def public_functions():
    """Those that compute something: the others are imported when they are asked for."""
    names = set(metalcore.__all__) - set(metalcore._LAZY) - metalcore._LAZY_MODULES
    return {name for name in names if inspect.isfunction(getattr(metalcore, name))}


def test_passes(kind, capsys, monkeypatch):
    """Every check passes, and every function is called by one directly: not only by another function."""
    names, called = public_functions(), set()
    for name in names:

        def recorded(*arguments, name=name, function=getattr(metalcore, name), **options):
            called.add(name)
            return function(*arguments, **options)

        monkeypatch.setattr(metalcore, name, recorded)
    status, out = run(capsys, kind, "--json")
    assert names - called == set()
    found = json.loads(out)
    assert status == 0, found["summary"]
    assert found["machine"]["device"].startswith(kind)
    assert {check["status"] for check in found["checks"]} == {"ok"}
    assert len(found["checks"]) >= len(CASES) * len(DTYPES) + 3


@pytest.fixture
def few(monkeypatch):
    for name in CASES.keys() - {"silu", "rms_norm"}:
        monkeypatch.delitem(CASES, name)


def failures(out):
    return {line.split("] ")[1][9:].split("  ")[0] for line in out.splitlines() if "] FAILED" in line}


def test_a_wrong_result_is_named(kind, few, capsys, monkeypatch):
    silu = metalcore.silu
    monkeypatch.setattr(metalcore, "silu", lambda x: silu(x) * (1 + 2**-5))
    status, out = run(capsys, kind)
    assert status == 1
    assert failures(out) == {f"silu, {name}" for name in ("float32", "float16", "bfloat16")}
    assert "3 FAILED: silu, float32; silu, float16; silu, bfloat16" in out.splitlines()[-1]


def test_a_wrong_gradient_is_named(kind, few, capsys, monkeypatch):
    silu = metalcore.silu
    monkeypatch.setattr(metalcore, "silu", lambda x: silu(x) + (x - x.detach()) * 0.25)  # adds 0.25 to the derivative
    status, out = run(capsys, kind)
    assert status == 1 and len(failures(out)) == 3
    assert all("error of gradient" in line for line in out.splitlines() if "] FAILED" in line)


def test_checks_are_counted(kind, few, capsys):
    lines = [line for line in run(capsys, kind)[1].splitlines() if line.startswith("[")]
    count = len(lines)
    assert count >= 8 and [line[1:].split("]")[0].strip() for line in lines] == [
        f"{number}/{count}" for number in range(1, count + 1)
    ]


def test_nan_and_exceptions_fail(kind, few, capsys, monkeypatch):
    def broken(*arguments):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(metalcore, "silu", lambda x: x * float("nan"))
    monkeypatch.setattr(metalcore, "rms_norm", broken)
    status, out = run(capsys, kind)
    assert status == 1 and len(failures(out)) == 6
    assert out.count("RuntimeError: no such kernel") == 3


def test_faulty_shaders_are_noticed(kind, few, capsys, monkeypatch):
    monkeypatch.setattr(metalcore, "compile_shader", lambda source: None)
    assert failures(run(capsys, kind)[1]) == {"compile_shader", "compile_shader refuses a faulty program"}


def test_kernels_that_metal_refuses_are_named(monkeypatch):
    def compile_kernel(name):
        if name == "bad":
            raise RuntimeError("program_source:7: error")

    monkeypatch.setattr(metalcore._C, "mps_kernels", lambda: ["good", "bad", "better"], raising=False)
    monkeypatch.setattr(metalcore._C, "mps_compile", compile_kernel, raising=False)
    with pytest.raises(RuntimeError, match="1 of 3 built-in kernels do not compile\nbad: program_source:7: error"):
        selftest._check_kernels()


@pytest.mark.only_on("simulator")
def test_the_simulator_is_the_default_without_a_gpu():
    assert devices.default() == "simulator"
