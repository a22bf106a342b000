"""The cache of compiled programs: where it is, and what happens to it."""

import os
import subprocess
import sys
import warnings

import pytest

import metalcore
from metalcore.msl import cache, host

pytestmark = pytest.mark.only_on("simulator")  # programs for CUDA: test_cuda_programs.py
SOURCE = "kernel void {name}(device float* x, uint i [[thread_position_in_grid]]) {{ x[i] = {value}; }}"


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("METALCORE_CACHE_DIR", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    cache._fallback_directory.cache_clear()


@pytest.fixture
def compilations(monkeypatch):
    """The outputs the host compiler was asked for."""
    made, compile_source = [], host.compile_source

    def counted(source, output, **options):
        made.append(output)
        return compile_source(source, output, **options)

    monkeypatch.setattr(host, "compile_source", counted)
    return made


def files(directory):
    return sorted(path.name for path in directory.iterdir() if path.is_file())


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({"METALCORE_CACHE_DIR": "/a"}, "/a"),
        ({"METALCORE_CACHE_DIR": "", "XDG_CACHE_HOME": "/b"}, "/b/metalcore"),
        ({"METALCORE_CACHE_DIR": "", "XDG_CACHE_HOME": "", "HOME": "/c"}, "/c/.cache/metalcore"),
    ],
)
def test_where_it_is(monkeypatch, variables, expected):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(cache.cache_directory()) == expected


def test_a_program_is_compiled_once(directory, compilations):
    for _ in range(2):
        metalcore.compile_shader(SOURCE.format(name="k", value=1))
    assert len(compilations) == 1
    metalcore.compile_shader(SOURCE.format(name="k", value=2))
    metalcore.compile_shader(SOURCE.format(name="k", value=1), constants={})
    assert len(compilations) == 2
    assert [name.split(".")[1] for name in files(directory)].count("so") == 2


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"x" + data[1:]]
)
def test_damaged_entries_are_made_again(directory, compilations, damage):
    source = SOURCE.format(name="k", value=3)
    metalcore.compile_shader(source)
    for name in files(directory):
        (directory / name).write_bytes(damage((directory / name).read_bytes()))
    assert dir(metalcore.compile_shader(source)) == ["k"]
    assert len(compilations) == 2
    assert all(cache.is_intact(directory / name) for name in files(directory))


def test_a_failed_compilation_leaves_nothing(directory):
    with pytest.raises(SyntaxError):
        metalcore.compile_shader("kernel void k(device float* x) { x[0] = y; }")
    assert all(name.endswith(".json") for name in files(directory))


def test_a_directory_that_cannot_be_made_falls_back_with_one_warning(directory, compilations):
    directory.write_text("a file is in the way")
    source = SOURCE.format(name="k", value=4)
    with pytest.warns(RuntimeWarning, match="cannot be written .*METALCORE_CACHE_DIR") as warned:
        metalcore.compile_shader(source)
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metalcore.compile_shader(source)
        metalcore.compile_shader(SOURCE.format(name="k", value=5))
    assert len(compilations) == 2


def test_entries_of_a_read_only_directory_are_used(directory, compilations, monkeypatch):
    source = SOURCE.format(name="k", value=6)
    metalcore.compile_shader(source)
    monkeypatch.setattr(cache, "_fill", lambda path, make: pytest.fail("wrote to the cache"))
    metalcore.compile_shader(source)
    assert len(compilations) == 1


def test_processes_fill_it_at_once(directory, tmp_path, monkeypatch):
    log, compiler = tmp_path / "log", tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec {" ".join(host.find_compiler().command)} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    program = (
        "import torch, metalcore.simulator, metalcore\n"
        f"lib = metalcore.compile_shader({SOURCE.format(name='k', value=7)!r})\n"
        "x = torch.zeros(3, device='mps')\n"
        "lib.k(x)\n"
        "print(x.tolist())\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=300)[0].strip() for process in processes] == ["[7.0, 7.0, 7.0]"] * 3
    # In checking mode the program as checked comes beside the one that its kernels are listed from.
    programs = 2 if metalcore._C.simulator_checking()[0] else 1
    assert sorted(os.path.splitext(name)[1] for name in files(directory)) == [".json", *[".so"] * programs]
    assert all(cache.is_intact(directory / name) for name in files(directory))
    assert sum("-shared" in line for line in log.read_text().splitlines()) == programs
