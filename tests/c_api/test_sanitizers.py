"""The C program and the library's own sources under AddressSanitizer and UndefinedBehaviorSanitizer."""

import random
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from c_program import HERE, LIBRARY, OBJECTS, PACKAGE, ROOT, built_objects
from saved_programs import Block, Pair, Residual, Runs, compiled, replayed
from test_errors import REFUSED, as_words
from test_functions import add_all, check
from test_programs import rewritten

from metalcore.msl.runtime.host import find_compiler
from tools.build import c_library

pytestmark = pytest.mark.only_on("simulator")  # they need the kernels for CPUs

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g1", "-O1")


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    """The C programs, and csrc/c_api inside them. The rest of the library is as setup.py built it."""
    if not OBJECTS.exists():
        pytest.skip("the library's objects are not here: setup.py has not built it")
    compiler = find_compiler().command
    folder = tmp_path_factory.mktemp("sanitized")
    flags = [flag for flag in c_library.compile_flags() if flag != "-O2"]
    ours = ROOT / "csrc" / "c_api"
    sources = sorted(ours.rglob("*.cpp"))

    def compiled_object(source):
        output = folder / f"{'-'.join(source.relative_to(ours).with_suffix('').parts)}.o"
        subprocess.run([*compiler, *flags, *SANITIZERS, "-c", str(source), "-o", str(output)], check=True)
        return output

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled_object, sources))
    others = [part for part in built_objects() if not part.startswith(f"{OBJECTS}/csrc/c_api/")]

    def linked(name):
        main, program = folder / f"{name}.o", folder / name
        strict = ("-std=c99", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror")
        source = HERE / f"{name}.c"
        command = ["cc", *strict, *SANITIZERS, f"-I{PACKAGE / 'include'}", "-c", str(source), "-o", str(main)]
        subprocess.run(command, check=True)
        parts = map(str, (main, *objects, *others))
        subprocess.run([*compiler, *SANITIZERS, "-o", str(program), *parts, "-ldl", "-pthread"], check=True)
        return program

    return {name: linked(name) for name in ("calls", "programs")}


@pytest.mark.parametrize("checked", ["0", "1"])
def test_functions(sanitized, calls, checked):
    cases = add_all(calls)
    check(cases, calls.run(sanitized["calls"], METALCORE_CHECK=checked, METALCORE_LIBRARY_DIR=str(LIBRARY)))


def test_threads(sanitized, calls):
    add_all(calls)
    calls.run(sanitized["calls"], "--threads", "4", METALCORE_LIBRARY_DIR=str(LIBRARY), OMP_NUM_THREADS="2")


def test_cuda(sanitized, calls, fakes):
    """Contexts for GPUs in four threads, with a driver that runs no kernels."""
    add_all(calls)
    options = ("--device", "1", "--threads", "4", "--repeat", "2")
    reports = calls.run(sanitized["calls"], *options, METALCORE_LIBRARY_DIR=str(LIBRARY), **fakes)
    assert {status for status, *_ in reports} == {"METALCORE_OK"}


def test_refused(sanitized, calls):
    for arguments in REFUSED.values():
        calls.add(*as_words(arguments))
    reports = calls.run(sanitized["calls"], METALCORE_LIBRARY_DIR=str(LIBRARY))
    assert {status for status, *_ in reports} == {"METALCORE_INVALID_ARGUMENT"}


def environment(**more):
    return {"METALCORE_LIBRARY_DIR": str(LIBRARY), **more}


def test_programs(sanitized, device, tmp_path):
    runs = Runs(tmp_path)
    for kind in (Block, Pair):
        program, arguments = compiled(kind, device)
        program.save(tmp_path / f"{kind.__name__}.mcore", recordings=True)
        runs.add(tmp_path / f"{kind.__name__}.mcore", arguments, replayed(program, arguments))
    for trusted in ("0", "1"):
        reports = runs.run(sanitized["programs"], "--trusted", trusted, "--repeat", "2", environment=environment())
        assert [status for status, *_ in reports] == ["METALCORE_OK"] * 2


def changed(recording, draw):
    """Sets some of the numbers and texts of a recording to others."""
    places = []

    def find(there, path):
        for key, value in there.items() if isinstance(there, dict) else enumerate(there):
            if isinstance(value, (dict, list)):
                find(value, (*path, key))
            else:
                places.append((*path, key))

    find(recording, ())
    for *path, last in draw.sample(places, draw.choice((1, 1, 2, 3))):
        there = recording
        for key in path:
            there = there[key]
        value = there[last]
        if isinstance(value, (int, float)):
            there[last] = draw.choice((0, 1, value + 1, value - 1, 2 * value, 1 << draw.randrange(20), -1, "text"))
        else:
            digits = list(value or "0")
            digits[draw.randrange(len(digits))] = draw.choice("0123456789abcdef")
            there[last] = draw.choice(("".join(digits), "".join(digits), 7, []))


def test_changed_recordings(sanitized, device, tmp_path):
    """Whatever a recording says, with a digest that fits: an error, or a run within the arrays."""
    runs, draw = Runs(tmp_path), random.Random(0)
    program, _ = compiled(Pair, device)
    program.save(tmp_path / "a.mcore", recordings=True)
    for number in range(250):
        runs.add(rewritten(tmp_path / f"{number}.mcore", tmp_path / "a.mcore", lambda found: changed(found, draw)))
    limits = {"METALCORE_TIMEOUT": "2", "OMP_NUM_THREADS": "2"}
    reports = runs.run(sanitized["programs"], environment=environment(**limits))
    found = {status for status, *_ in reports}
    assert {"METALCORE_OK", "METALCORE_INVALID_FILE", "METALCORE_KERNEL_FAULT"} <= found
    assert found <= {
        *("METALCORE_OK", "METALCORE_INVALID_FILE", "METALCORE_KERNEL_FAULT"),
        *("METALCORE_OUT_OF_MEMORY", "METALCORE_INVALID_ARGUMENT", "METALCORE_FAILED"),
    }


def test_changed_recipes(sanitized, device, tmp_path):
    """The same for the recipe by which constants are made of the weights."""
    runs, draw = Runs(tmp_path), random.Random(0)
    program, _ = compiled(Residual, device)
    program.save(tmp_path / "a.mcore", weights="apart", recordings=True)
    for number in range(100):
        path = tmp_path / f"{number}.mcore"
        rewritten(path, tmp_path / "a.mcore", lambda _: None, lambda found: changed(found["recipe"], draw))
        runs.add(path)
    reports = runs.run(sanitized["programs"], "--trusted", "1", environment=environment())
    assert {"METALCORE_OK", "METALCORE_INVALID_FILE"} == {status for status, *_ in reports}
