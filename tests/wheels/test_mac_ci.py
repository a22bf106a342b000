"""tools/mac_ci.py says what ran on a Mac and what passed. One script stands for a Mac's programs."""

import os
import shutil
import zipfile
from pathlib import Path

import pytest

from tools import mac_ci

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
# The programs say what the file of their name in $SAYS has, and end with the status in its first line.
PROGRAM = """#!/usr/bin/env sh
say() { [ -f "$SAYS/$1" ] || exit 0; tail -n +2 "$SAYS/$1"; exit "$(head -n 1 "$SAYS/$1")"; }
echo "$(basename "$0") $*" >>"$SAYS/log"
case "$(basename "$0") $*" in
  python*" -m venv"*) for folder; do :; done; mkdir -p "$folder/bin"; cp "$0" "$folder/bin/python" ;;
  python*" -m pip"*) [ -z "$DEVELOPER_DIR" ] || say pip-source; say pip ;;
  python*" -c"*) say gpu ;;
  python*" -m metalcore "*) say "$3" ;;
  cc*) [ -f "$SAYS/cc" ] && say cc; for program; do :; done; cp "$0" "$program" ;;
  next_token*) say next_token ;;
  xcrun*--version) [ -z "$DEVELOPER_DIR" ] || say metal-of-the-tools; say metal ;;
  xcrun*-fsyntax-only*) say new-options ;;
  xcrun*) for word; do case $word in *.metal) say "$(basename "$word")" ;; esac; done ;;
  sysctl*) say virtual ;;
  *) exit 99 ;;
esac
"""
RIGHT = {
    "info": "0\nversions\n  torch            2.14.1\nbackends\n  metal            9 kernels, GPU family apple8",
    "gpu": "0\nTrue",
    "selftest": "0\n800 of 800 checks passed",
    "cflags": "0\n-I/include",
    "next_token": "0\ndrawn: 5",
    "metal": "0\nApple metal version 32023.404\nTarget: air64",
    "metal-of-the-tools": '72\nxcrun: error: unable to find utility "metal"',
    "check": "0\n2 of 2 programs have no findings",
    "virtual": "0\n0",
}


@pytest.fixture
def mac(tmp_path, monkeypatch):
    """A function that runs tools/mac_ci.py where programs say these texts, and returns its status and its table."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("xcrun", "sysctl", "cc", *(f"python{version}" for version in PYTHONS)):
        (programs / name).write_text(PROGRAM)
        (programs / name).chmod(0o755)
    (tmp_path / "tools").mkdir()
    monkeypatch.setattr(mac_ci, "COMMAND_LINE_TOOLS", str(tmp_path / "tools"))
    monkeypatch.setattr(mac_ci.sys, "executable", str(programs / "python3.12"))
    for name in ("sh", "basename", "cp", "head", "mkdir", "tail"):
        (programs / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("SAYS", str(tmp_path / "says"))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary"))
    monkeypatch.setenv("CI", "true")
    monkeypatch.setattr(mac_ci, "WORK", tmp_path / "work")
    wheel, sdist = tmp_path / "metalcore-0-cp310-abi3-macosx_14_0_arm64.whl", tmp_path / "metalcore-0.tar.gz"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("softmax", "linalg/qr"):
            archive.writestr(f"metalcore/lib/metal/{name}.metal", "")
    sdist.touch()

    def run(without=(), **texts):
        for name in without:
            (programs / name).unlink()
        (tmp_path / "says").mkdir()
        for name, text in (RIGHT | texts).items():
            (tmp_path / "says" / name).write_text(text)
        status = mac_ci.main([sdist, wheel])
        lines = (tmp_path / "summary").read_text().splitlines()
        cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
        return status, {what: (outcome, *notes) for what, outcome, *notes in cells[1:]}

    return run


NEW_OPTIONS = "-fmetal-math-mode=safe -fmetal-math-fp32-functions=precise"
COMPILER, CHECK = "Apple's compiler on 2 families of kernels", "metalcore check on 2 families of kernels"
C = "C program: cc, run"
SOURCE = "source distribution with Command Line Tools alone: pip install, info"


def log():
    return Path(os.environ["SAYS"], "log").read_text().splitlines()


def test_everything_passes(mac):
    status, table = mac()
    assert status == 0 and {outcome for outcome, *_ in table.values()} == {"passed"}
    assert len(table) == 2 * len(PYTHONS) + 4
    assert table[C] == ("passed", "drawn: 5")
    assert table["Python 3.13: pip install, info"][1] == "torch 2.14.1, Metal: 9 kernels, GPU family apple8"
    assert table["Python 3.13: selftest"][1] == "800 of 800 checks passed"
    installed = [line for line in log() if " -m pip install" in line]
    assert len(installed) == len(PYTHONS) + 1 and [line for line in installed if line.endswith("torch==2.10.*")]
    assert sum(line.endswith(".metallib") and " -Wall " in line and "-std=metal3.1" in line for line in log()) == 2
    assert [line for line in log() if " check " in line and line.count(".metal") == 2]


def test_apples_compiler_warns(mac, tmp_path):
    warning = "softmax.metal:3:1: warning: unused variable 'x'"
    status, table = mac(**{"softmax.metal": f"0\n{warning}"})
    note = f"Apple metal version 32023.404; 1 warnings; -std=metal3.1 -O2 -mmacosx-version-min=14.0 {NEW_OPTIONS}"
    assert (status, table[COMPILER]) == (0, ("passed", note))
    assert (tmp_path / "work/metal/softmax.txt").read_text().strip() == warning


@pytest.mark.parametrize(
    "said, options",
    [("0", NEW_OPTIONS), ("1\nerror: unknown argument: '-fmetal-math-mode=safe'", "-fno-fast-math")],
)
def test_the_compiler_gets_the_options_that_it_knows(mac, said, options):
    status, table = mac(**{"new-options": said})
    assert status == 0 and table[COMPILER][1].endswith(f" {options}")
    made = [line for line in log() if line.endswith(".metallib")]
    assert len(made) == 2 and all(f" {options} -Wall" in line for line in made)


@pytest.mark.parametrize(
    "texts, row, says",
    [
        ({"qr.metal": "1\nqr.metal:3:1: error: no"}, COMPILER, "refused: linalg/qr"),
        ({"check": "1\n1 of 2 programs have no findings"}, CHECK, "1 of 2 programs have no findings"),
        ({"pip": "1\nERROR: not a supported wheel"}, "Python 3.10: pip install, info", "not a supported wheel"),
        ({"info": "1\nImportError: symbol not found"}, "Python 3.14: pip install, info", "info: ImportError"),
        ({"info": "0\nversions\n  torch 2.14.1"}, "Python 3.14: pip install, info", "it names no kernels for Metal"),
        ({"gpu": "134\nAbort trap"}, "Python 3.11: selftest", "Abort trap"),
        ({"selftest": "1\n1 FAILED: silu"}, "Python 3.12: selftest", "1 FAILED: silu"),
        ({"cflags": "1\nRuntimeError: this build has no library for C"}, C, "has no library for C"),
        ({"cc": "1\nld: library 'metalcore' not found"}, C, "library 'metalcore' not found"),
        ({"next_token": "1\nMETALCORE_FAILED: no"}, C, "METALCORE_FAILED: no"),
        ({"pip-source": "1\nerror: no compiler"}, SOURCE, "pip: error: no compiler"),
        ({"metal-of-the-tools": "0\nApple metal"}, SOURCE, "this shows nothing"),
    ],
)
def test_a_failure_is_named(mac, texts, row, says):
    status, table = mac(**texts)
    assert status == 1 and table[row][0] == "FAILED" and says in table[row][1]


@pytest.mark.parametrize(
    "without, texts, row, says",
    [
        (["cc"], {}, C, "there is no cc"),
        (["python3.11"], {}, "Python 3.11: pip install, info", "there is no python3.11"),
        (["xcrun"], {}, COMPILER, "there is no xcrun"),
        ([], {"metal": "1\nerror: missing Metal Toolchain"}, COMPILER, "error: missing Metal Toolchain"),
        ([], {"check": "2\ncheck: checking MSL needs Clang 15"}, CHECK, "checking MSL needs Clang 15"),
    ],
)
@pytest.mark.parametrize("ci", ["true", ""])
def test_what_does_not_run_fails_in_continuous_integration_alone(mac, monkeypatch, without, texts, row, says, ci):
    monkeypatch.setenv("CI", ci)
    status, table = mac(without, **texts)
    assert (status, table[row][0]) == (bool(ci), "did not run") and says in table[row][1]


def test_selftest_needs_a_gpu(mac):
    status, table = mac(gpu="0\nFalse")
    assert (status, table["Python 3.12: selftest"]) == (0, ("did not run", "PyTorch finds no GPU"))


def test_a_virtual_gpu_does_not_count(mac):
    status, table = mac(virtual="0\n1", selftest="1\n3 FAILED: qr")
    outcome, note = table["Python 3.12: selftest"]
    assert (status, outcome, note) == (0, "failed, which is not counted", "on a virtual GPU: 3 FAILED: qr")


def test_nor_does_it_for_a_c_program(mac):
    status, table = mac(virtual="0\n1", next_token="1\nMETALCORE_NO_DEVICE: refused")
    assert (status, table[C][0]) == (0, "failed, which is not counted")


def test_a_selftest_that_hangs(mac, monkeypatch):
    monkeypatch.setattr(mac_ci, "SELFTEST_SECONDS", 0)
    status, table = mac()
    assert status == 1 and table["Python 3.10: selftest"][:1] == ("FAILED",)
