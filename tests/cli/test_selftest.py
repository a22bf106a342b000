"""python -m metalcore selftest passes where the ops are right, and names those that are wrong."""

import dataclasses
import json
import os
import platform
import re
from pathlib import Path

import pytest
import torch

import metalcore
from metalcore import _C
from metalcore._core.registry import OPS, Sample
from metalcore.cli import devices, main, selftest_report
from tools.register_gate import NVIDIA

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
    assert found["machine"]["device"] == kind
    assert found["ops"].keys() == OPS.keys()
    assert all(0 <= op["error"] <= 1 and op["microseconds"] > 0 for op in found["ops"].values())
    assert found["text"].count("\n") < 90
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


def block(out):
    """The lines that selftest has people paste."""
    return out.split("from here\n")[1].split("\n-----")[0].splitlines()


def rows(out):
    """{op: (error, time, PyTorch's time)} of the block."""
    cells = " ".join(
        block(out)[block(out).index(next(line for line in block(out) if "PyTorch  " in line)) + 1 :]
    ).split()
    return {cells[i]: tuple(cells[i + 1 : i + 4]) for i in range(0, len(cells), 4)}


def test_the_block_to_paste(kind, few, capsys):
    status, out = run(capsys, kind)
    lines = block(out)
    assert status == 0 and len(lines) == 8 and max(map(len, lines)) < 130
    assert lines[0].startswith(f"metalcore {metalcore.__version__}, torch {torch.__version__}, Python ")
    assert lines[1].startswith(f"{kind}: ") and "CPU cores" in lines[1]
    assert lines[2].startswith("float16's subnormal numbers: ")
    assert " checks passed" in lines[3] and lines[4].split()[1].startswith("s")
    for error, microseconds, pytorch in rows(out).values():
        assert 0 <= float(error) <= 1 and float(microseconds) > 0 and float(pytorch) > 0
    assert rows(out).keys() == {"silu", "rms_norm"}


def test_the_block_names_what_is_wrong_and_what_pytorch_has_not(kind, few, capsys, monkeypatch):
    def missing(*arguments, **options):
        raise NotImplementedError("The operator is not currently implemented for the MPS device.")

    replace(monkeypatch, "silu", lambda x: metalcore.silu(x) * (1 + 2**-5))
    monkeypatch.setattr(selftest_report, "CALLS", 1)
    found = selftest_report.times(dataclasses.replace(OPS["rms_norm"], reference=missing), "cpu", True)
    assert found["microseconds of PyTorch"] is None
    _, out = run(capsys, kind)
    assert rows(out)["silu"][0] == "FAILED" and float(rows(out)["rms_norm"][0]) <= 1


def test_programs_see_progress_beside_the_result(kind, few, capsys):
    main(["selftest", "--device", kind, "--json"])
    out, err = capsys.readouterr()
    assert len(json.loads(out)["checks"]) == sum(line.startswith("[") for line in err.splitlines()) >= 8


@pytest.mark.only_on("simulator")
@pytest.mark.parametrize("flushing", [False, True])
def test_subnormal_numbers_of_float16(few, capsys, flushing):
    before = _C.simulator_info()["flushing"]
    _C.simulator_set_flushing(flushing)
    try:
        out = run(capsys, "simulator")[1]
    finally:
        _C.simulator_set_flushing(before)
    says = "they become zero here; packed weights are decoded without them" if flushing else "kept"
    assert block(out)[2] == f"float16's subnormal numbers: {says}"


# What a Mac compiles.
KERNELS = {
    kernel: family
    for family, *kernels in map(str.split, (Path(metalcore.__file__).parent / "lib/index").read_text().splitlines())
    for kernel in kernels
    if not re.fullmatch("|".join(NVIDIA), kernel)
}


def test_it_takes_two_minutes_at_most_on_the_slowest_mac():
    """By the cost model and assumptions. An op whose samples are too large, or many more kernels, would take more."""
    timed = selftest_report.CALLS * selftest_report.ROUNDS
    seconds = selftest_report.estimate(KERNELS, timed)
    assert sum(seconds.values()) < selftest_report.MOST_SECONDS
    assert seconds["compiling"] > 10 and seconds["checks"] > 5  # nothing is left out
    many = {f"{kernel}_{i}": family for kernel, family in KERNELS.items() for i in range(4)}
    assert sum(selftest_report.estimate(many, timed, [OPS["silu"]]).values()) > selftest_report.MOST_SECONDS
    large = dataclasses.replace(OPS["svdvals"], samples=lambda: (Sample("large", ((1500, 1500),)),))
    assert selftest_report.estimate({}, timed, [large])["times"] > selftest_report.MOST_SECONDS


@pytest.mark.skipif(platform.system() == "Darwin", reason="programs stand for a Mac's")
def test_the_machine_is_a_macs(monkeypatch, tmp_path):
    says = {
        "sysctl": 'case "$2" in machdep*) echo Apple M1 ;; kern.hv*) echo 1 ;; esac',
        "ioreg": """echo '+-o AGXAcceleratorG13G  <class AGXAcceleratorG13G>'; echo '    "gpu-core-count" = 7'""",
    }
    for name, text in says.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "mac_ver", lambda: ("15.5", ("", "", ""), "arm64"))
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    found = devices.describe("mps")
    assert found["chip"] == "Apple M1" and found["cores"] == f"{os.cpu_count()} CPU cores, 7 GPU cores"
    assert found["system"] == "macOS 15.5 (arm64, a virtual machine)"
    monkeypatch.setenv("PATH", "/nowhere")
    assert devices.describe("mps")["cores"].endswith("unknown GPU cores")


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
    assert failures(run(capsys, kind)[1]) == {
        "compile_shader",
        "compile_shader refuses a faulty program",
        "float16's subnormal numbers",
    }


@pytest.mark.only_on("simulator")
def test_the_simulator_is_the_default_without_a_gpu():
    assert devices.default() == "simulator"
