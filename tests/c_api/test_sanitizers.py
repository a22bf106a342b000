"""The C program and the library's own sources under AddressSanitizer and UndefinedBehaviorSanitizer."""

import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from c_program import HERE, LIBRARY, OBJECTS, PACKAGE, ROOT
from test_errors import REFUSED, as_words
from test_functions import add_all, check

from metalcore.msl.host import find_compiler

pytestmark = pytest.mark.only_on("simulator")  # they need the kernels for CPUs

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g1", "-O1")


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    """The program, and csrc/c_api inside it. The rest of the library is as setup.py built it."""
    if not OBJECTS.exists():
        pytest.skip("the library's objects are not here: setup.py has not built it")
    compiler = find_compiler().command
    folder = tmp_path_factory.mktemp("sanitized")
    (line,) = [line for line in (OBJECTS / "build.ninja").read_text().splitlines() if line.startswith("post_cflags")]
    flags = [flag for flag in shlex.split(line.split("=", 1)[1]) if flag != "-O2"]
    ours = ROOT / "csrc" / "c_api"
    sources = sorted(ours.rglob("*.cpp"))

    def compiled(source):
        output = folder / f"{'-'.join(source.relative_to(ours).with_suffix('').parts)}.o"
        subprocess.run([*compiler, *flags, *SANITIZERS, "-c", str(source), "-o", str(output)], check=True)
        return output

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, sources))
    others = [path for path in (OBJECTS / "csrc").rglob("*.o") if "c_api" not in path.relative_to(OBJECTS).parts]
    main = folder / "main.o"
    strict = ("-std=c99", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror")
    command = ["cc", *strict, *SANITIZERS, f"-I{PACKAGE / 'include'}", "-c", str(HERE / "calls.c"), "-o", str(main)]
    subprocess.run(command, check=True)
    program = folder / "calls"
    parts = map(str, (main, *objects, *others))
    subprocess.run([*compiler, *SANITIZERS, "-o", str(program), *parts, "-ldl", "-pthread"], check=True)
    return program


@pytest.mark.parametrize("checked", ["0", "1"])
def test_functions(sanitized, calls, checked):
    cases = add_all(calls)
    check(cases, calls.run(sanitized, METALCORE_CHECK=checked, METALCORE_LIBRARY_DIR=str(LIBRARY)))


def test_threads(sanitized, calls):
    add_all(calls)
    calls.run(sanitized, "--threads", "4", METALCORE_LIBRARY_DIR=str(LIBRARY), OMP_NUM_THREADS="2")


def test_cuda(sanitized, calls, fakes):
    """Contexts for GPUs in four threads, with a driver that runs no kernels."""
    add_all(calls)
    options = ("--device", "1", "--threads", "4", "--repeat", "2")
    reports = calls.run(sanitized, *options, METALCORE_LIBRARY_DIR=str(LIBRARY), **fakes)
    assert {status for status, *_ in reports} == {"METALCORE_OK"}


def test_refused(sanitized, calls):
    for arguments in REFUSED.values():
        calls.add(*as_words(arguments))
    reports = calls.run(sanitized, METALCORE_LIBRARY_DIR=str(LIBRARY))
    assert {status for status, *_ in reports} == {"METALCORE_INVALID_ARGUMENT"}
