"""The ways in which a C program finds the library: flags, pkg-config, CMake; also where the package was moved to."""

import os
import shlex
import shutil
import subprocess

import pytest
from c_program import LIBRARY, PACKAGE, ROOT

from metalcore.cli import main

pytestmark = pytest.mark.only_on("simulator")  # they need the kernels for CPUs

EXAMPLE = ROOT / "examples" / "c"


@pytest.fixture(autouse=True)
def built():
    if not (LIBRARY / "libmetalcore.so").exists():
        pytest.skip("libmetalcore is built for Linux")


def run(*command, **environment):
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def check_example(program, **environment):
    said = run(program, **environment)
    assert "token 5: 0.6" in said and "drawn: " in said
    assert said.endswith("metalcore_softmax_float: temperature must be positive and finite")


@pytest.fixture
def cflags(capsys):
    """What `python -m metalcore cflags` prints with some options."""

    def printed(*options):
        assert main(["cflags", *options]) == 0
        return capsys.readouterr().out.strip()

    return printed


def test_flags(tmp_path, cflags):
    program = tmp_path / "next_token"
    flags = [*shlex.split(cflags()), *shlex.split(cflags("--libs"))]
    run("cc", "-std=c99", "-Wall", "-Werror", EXAMPLE / "next_token.c", "-o", program, *flags)
    check_example(program)


def test_pkg_config(tmp_path, cflags):
    shutil.copytree(EXAMPLE, tmp_path / "c")
    run("make", "-C", tmp_path / "c", PKG_CONFIG_PATH=cflags("--pkgconfig-dir"))
    check_example(tmp_path / "c" / "next_token")


def test_cmake(tmp_path, cflags):
    run("cmake", "-S", EXAMPLE, "-B", tmp_path, f"-Dmetalcore_DIR={cflags('--cmake-dir')}")


def test_cmake_where_the_package_was_moved(tmp_path):
    """The files lie as in a wheel, in another place. The kernels are found beside the library."""
    package = tmp_path / "some where" / "metalcore"
    shutil.copytree(PACKAGE / "include", package / "include")
    for path in LIBRARY.rglob("*"):
        if path.is_file() and path.relative_to(LIBRARY).parts[0] not in ("checking", "cuda"):
            if path.suffix != ".so" or path.name in ("libmetalcore.so", "softmax.so", "sample.so"):
                target = package / "lib" / path.relative_to(LIBRARY)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)
    run("cmake", "-S", EXAMPLE, "-B", tmp_path / "build", f"-Dmetalcore_DIR={package / 'lib' / 'cmake' / 'metalcore'}")
    run("cmake", "--build", tmp_path / "build")
    program = tmp_path / "build" / "next_token"
    assert str(package) in run("ldd", program)
    check_example(program)


def test_folder_by_the_environment(tmp_path):
    """A library that lies apart from the kernels."""
    shutil.copy(LIBRARY / "libmetalcore.so", tmp_path)
    flags = [f"-I{PACKAGE / 'include'}", f"-L{tmp_path}", "-lmetalcore", f"-Wl,-rpath,{tmp_path}"]
    program = tmp_path / "next_token"
    run("cc", EXAMPLE / "next_token.c", "-o", program, *flags)
    alone = subprocess.run([program], capture_output=True, text=True)
    assert alone.returncode == 1
    assert alone.stderr.startswith("METALCORE_NO_KERNELS: metalcore_softmax_float: there are no kernels in '")
    check_example(program, METALCORE_LIBRARY_DIR=str(LIBRARY))
