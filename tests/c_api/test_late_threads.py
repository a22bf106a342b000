"""A thread that comes late into a dispatch of the simulator finds the memory that it needs."""

import subprocess

import pytest
from c_program import HERE, OBJECTS, PACKAGE, ROOT, built_objects

from metalcore.msl.runtime.host import find_compiler


def test_no_allocations_by_late_threads(tmp_path):
    if not OBJECTS.exists():
        pytest.skip("the library's objects are not here: setup.py has not built it")
    counter, program = tmp_path / "counter.o", tmp_path / "late_threads"
    subprocess.run(["cc", "-O1", "-c", str(HERE / "count_allocations.c"), "-o", str(counter)], check=True)
    folders = (f"-I{ROOT / 'csrc' / 'backends' / 'simulator'}", f"-I{PACKAGE / 'msl' / 'include'}")
    parts = (HERE / "late_threads.cpp", counter, *built_objects())
    command = [*find_compiler().command, "-std=c++20", "-O1", "-Wall", "-Werror", *folders, *map(str, parts)]
    subprocess.run([*command, "-o", str(program), "-ldl", "-pthread"], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=120)
    assert done.stdout == "workers: 0\nthreads: 0\nbusy workers: 0\n", done.stderr
