"""The source distribution has the checkout's files, and the wheel that is made from it has the right ones.

The compiler is a stand-in, since only the names of the files matter. Continuous integration builds the wheel from the
source distribution with a real one.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from test_wheel_check import wheel_check

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.only_on("simulator"),
    pytest.mark.skipif(not (ROOT / ".git").exists() and not os.environ.get("CI"), reason="not a git checkout"),
]

# Regular expressions for paths of the checkout that the source distribution leaves out.
LEFT_OUT = [
    r"\.(agent|ci|github)/.*",
    r"\.gitignore",
    r"benchmarks/results/.*",  # figures and pictures
]
SET = "x86-64" if platform.machine() == "x86_64" else platform.machine()
# Setuptools adds these.
ADDED = r"PKG-INFO|setup\.cfg|metalcore\.egg-info/.*"


def run(folder, *arguments, status=0, **variables):
    environment = {name: value for name, value in os.environ.items() if name not in ("METALCORE_ISA", "PYTHONPATH")}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, env={**environment, **variables}
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


def files(folder):
    """{path: (content, whether it can be executed)} of a folder."""
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes(), bool(path.stat().st_mode & 0o100))
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the checkout's files: git's, and new ones that git does not ignore."""
    folder = tmp_path_factory.mktemp("checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():  # git lists removed files until the removal is staged
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def unpacked(checkout, tmp_path_factory):
    """The source distribution, unpacked."""
    folder, had = tmp_path_factory.mktemp("sdist"), files(checkout)
    # A build adds such files to directories that the source distribution takes as a whole.
    for name in (
        "metalcore/lib/x86-64/activation/softmax.so",
        "metalcore/_C.abi3.so",
        "tests/__pycache__/conftest.cpython.pyc",
    ):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).touch()
    run(checkout, "setup.py", "-q", "sdist", "-d", str(folder))
    (path,) = folder.glob("metalcore-*.tar.gz")
    with tarfile.open(path) as archive:
        archive.extractall(folder, filter="tar")
    return had, folder / path.name.removesuffix(".tar.gz")


def test_the_source_distribution_has_what_the_checkout_has(unpacked):
    had, folder = unpacked
    expected = {
        name: content for name, content in had.items() if not any(re.fullmatch(pattern, name) for pattern in LEFT_OUT)
    }
    found = {name: content for name, content in files(folder).items() if not re.fullmatch(ADDED, name)}
    assert sorted(expected.keys() - found.keys()) == [], "files are missing: see MANIFEST.in"
    assert sorted(found.keys() - expected.keys()) == [], "there are too many files: see MANIFEST.in"
    assert [name for name in expected if found[name] != expected[name]] == []


def test_instruction_sets_that_the_simulator_does_not_know(unpacked, tmp_path):
    _, source = unpacked
    compiler = Path(__file__).with_name("stand_in_compiler.sh")
    done = run(
        source,
        "setup.py",
        "-q",
        "build_ext",
        "--build-lib",
        str(tmp_path),
        status=1,
        CXX=str(compiler),
        METALCORE_ISA="haswell",
    )
    assert "METALCORE_ISA: the simulator has no kernels for haswell" in done.stderr


@pytest.mark.parametrize("sets", [SET, ""], ids=["one instruction set", "no kernels for the simulator"])
def test_the_wheel_from_the_source_distribution(unpacked, tmp_path, sets):
    _, source = unpacked
    compiler = Path(__file__).with_name("stand_in_compiler.sh")
    run(source, "setup.py", "-q", "bdist_wheel", "-d", str(tmp_path), CXX=str(compiler), METALCORE_ISA=sets)
    (wheel,) = tmp_path.glob("*.whl")
    assert list(wheel_check.content_problems(wheel, sets)) == []
