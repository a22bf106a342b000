"""The cache of compiled programs: its place, and damaged, foreign and concurrent entries."""

import collections
import os
import stat
import subprocess
import sys
import tempfile
import warnings

import pytest
import torch

import metalcore
from metalcore import _device_library
from metalcore.msl import cache, private_files
from metalcore.msl.errors import MSLError
from metalcore.msl.language.translate import translate
from metalcore.msl.runtime import host
from metalcore.simulator import checking

pytestmark = pytest.mark.only_on("simulator")  # programs for CUDA: test_cuda_programs.py
SOURCE = "kernel void {name}(device float* x, uint i [[thread_position_in_grid]]) {{ x[i] = {value}; }}"


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("METALCORE_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    yield tmp_path / "cache"
    cache._fallback_directory.cache_clear()


@pytest.fixture
def compilations(monkeypatch):
    """The outputs that the host compiler was asked for."""
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
        ({"XDG_CACHE_HOME": "", "HOME": "/c"}, "/c/.cache/metalcore"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/c"}, "/c/.cache/metalcore"),
        ({"HOME": ""}, "TEMPORARY"),
        ({"HOME": "relative"}, "TEMPORARY"),
        ({}, "TEMPORARY"),
    ],
)
def test_where_it_is(tmp_path, monkeypatch, variables, expected):
    for name in ("METALCORE_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    expected = expected.replace("TEMPORARY", str(tmp_path / "temporary" / f"metalcore-{os.geteuid()}"))
    assert str(cache.cache_directory()) == expected


def test_a_program_is_compiled_once(directory, compilations):
    for _ in range(2):
        metalcore.compile_shader(SOURCE.format(name="k", value=1))
    assert len(compilations) == 1
    metalcore.compile_shader(SOURCE.format(name="k", value=2))
    metalcore.compile_shader(SOURCE.format(name="k", value=1), constants={})
    assert len(compilations) == 2
    assert [name.split(".")[1] for name in files(directory)].count("so") == 2


def test_one_mode_is_compiled(directory, compilations):
    x = torch.zeros(3, device="mps")
    with checking():
        program = metalcore.compile_shader(SOURCE.format(name="k", value=3))
        program.k(x)
        assert x.tolist() == [3.0, 3.0, 3.0]
    assert len(compilations) == 1
    program.k(x)
    assert len(compilations) == 2


def test_a_precompiled_prelude_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "_programs", collections.Counter())
    monkeypatch.setattr(host, "_preludes", {})
    text = translate(SOURCE.format(name="k", value=4)).source()
    outputs, errors = [tmp_path / f"{number}.so" for number in range(host._PROGRAMS_BEFORE + 2)], set()
    for output in outputs:
        host.compile_source(text, output)
        with pytest.raises(MSLError) as caught:
            host.compile_source(text.replace("= 4", "= four"), output.with_suffix(".not"))
        errors.add(str(caught.value))
    assert len({output.read_bytes() for output in outputs}) == len(errors) == 1
    assert bool(host._preludes) == (host.find_compiler().family == "gcc")


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
    with pytest.warns(RuntimeWarning, match="is not used .*Not a directory.*METALCORE_CACHE_DIR") as warned:
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
    monkeypatch.setattr(cache, "_fill", lambda *arguments: pytest.fail("wrote to the cache"))
    metalcore.compile_shader(source)
    assert len(compilations) == 1


# Files that others could have written ------------------------------------------------------------------------------


def made(path):
    """make() of a cache entry."""
    path.write_bytes(b"made here")


@pytest.mark.parametrize("umask", [0, 0o002, 0o022, 0o277])
def test_nobody_else_can_enter(directory, umask):
    before = os.umask(umask)
    try:
        assert cache.content("name", made) == b"made here"
    finally:
        os.umask(before)
    directories = [directory, directory / ".locks"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in directories] == [0o700, 0o700]
    assert stat.S_IMODE((directory / "name").stat().st_mode) == 0o600


def of_another_user(monkeypatch, *paths):
    """Makes these files and directories look as if they belonged to another user."""
    numbers = {path.stat().st_ino for path in paths}

    def status(descriptor):
        found = os.fstat(descriptor)
        owner = 54321 if found.st_ino in numbers else found.st_uid
        return os.stat_result([*found[:4], owner, *found[5:]])

    monkeypatch.setattr(private_files, "_status", status)


def spoil_entry(path, monkeypatch, how):
    match how:
        case "of another":
            of_another_user(monkeypatch, path)
        case "writable":
            path.chmod(0o646)
        case "writable by a group":
            path.chmod(0o664)
        case "a link":
            os.rename(path, path.with_name("elsewhere"))
            path.symlink_to("elsewhere")
        case "a fifo":
            path.unlink()
            os.mkfifo(path, 0o600)


SPOILT = {
    "of another": "belongs to user 54321",
    "writable": "can be written by others",
    "a link": "symbolic link",
    "writable by a group": "can be written by others",
    "a fifo": "not a regular file",
}


def made_elsewhere(says, tmp_path):
    """Asserts that an existing entry is not used, and that a new one is made in a directory of this user's."""
    with pytest.warns(RuntimeWarning, match=f"is not used .*{says}.*METALCORE_CACHE_DIR"):
        path = cache.entry("name", made)
    assert path.parent == tmp_path / "temporary" / f"metalcore-{os.geteuid()}"
    assert cache.is_intact(path) and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.entry("name", lambda path: pytest.fail("made again")) == path


@pytest.mark.parametrize("how", SPOILT)
def test_entries_of_others_are_not_used(directory, tmp_path, monkeypatch, how):
    cache.entry("name", lambda path: path.write_bytes(b"planted"))
    spoil_entry(directory / "name", monkeypatch, how)
    made_elsewhere(SPOILT[how], tmp_path)


@pytest.mark.parametrize("how", ["of another", "writable", "writable by a group"])
def test_directories_of_others_are_not_used(directory, tmp_path, monkeypatch, how):
    cache.entry("name", lambda path: path.write_bytes(b"planted"))
    if how == "of another":
        of_another_user(monkeypatch, directory)
    else:
        directory.chmod(0o707 if how == "writable" else 0o770)
    made_elsewhere(SPOILT[how], tmp_path)
    assert SPOILT[how] in cache.problem()


def test_directories_that_others_can_replace_are_not_used(directory, tmp_path, monkeypatch):
    monkeypatch.setenv("METALCORE_CACHE_DIR", str(directory / "of" / "mine"))
    cache.entry("name", lambda path: path.write_bytes(b"planted"))
    directory.chmod(0o777)
    made_elsewhere(SPOILT["writable"], tmp_path)
    directory.chmod(0o1777)  # as /tmp
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.content("name", made) == b"planted"


def test_a_directory_may_be_named_by_a_link(directory, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(directory)
    monkeypatch.setenv("METALCORE_CACHE_DIR", str(tmp_path / "link"))
    assert cache.entry("name", made) == directory / "name"


@pytest.mark.parametrize("target_is_there", [True, False])
def test_locks_do_not_follow_links(directory, tmp_path, target_is_there):
    target, locks = tmp_path / "target", directory / ".locks"
    locks.mkdir(parents=True, mode=0o700)
    directory.chmod(0o700)
    if target_is_there:
        target.write_text("precious")
    (locks / "name").symlink_to(target)
    made_elsewhere("symbolic link", tmp_path)
    assert (target.read_text() == "precious") if target_is_there else not target.exists()


def test_locks_are_not_truncated(directory):
    cache.entry("name", made)
    (directory / "name").unlink()
    (directory / ".locks" / "name").write_text("content")
    cache.entry("name", made)
    assert (directory / ".locks" / "name").read_text() == "content"


def test_links_in_place_of_the_temporary_directory_are_not_followed(tmp_path, monkeypatch):
    monkeypatch.delenv("METALCORE_CACHE_DIR")
    monkeypatch.setenv("HOME", "")
    (tmp_path / "mine").mkdir(mode=0o700)
    temporary = cache.temporary_directory()
    temporary.symlink_to(tmp_path / "mine")
    with pytest.warns(RuntimeWarning, match="symbolic link.*until this process ends"):
        path = cache.entry("name", made)
    assert path.parent.parent == temporary.parent and path.parent != temporary
    assert not any((tmp_path / "mine").iterdir())
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_root_is_trusted(monkeypatch, directory):
    cache.entry("name", made)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    of_root = os.stat_result([stat.S_IFREG | 0o644, 0, 0, 1, 0, *[0] * 5])
    assert private_files._problem(of_root) is None
    of_user = os.stat_result([stat.S_IFREG | 0o644, 0, 0, 1, 1234, *[0] * 5])
    assert private_files._problem(of_user) == "belongs to user 1234"


@pytest.mark.parametrize("what", ["program", "device"])
def test_what_is_loaded_comes_from_no_others(directory, tmp_path, compilations, monkeypatch, what):
    """Programs and the simulated device: their entries go through the same checks."""
    directory.mkdir()
    directory.chmod(0o777)
    if what == "program":
        with pytest.warns(RuntimeWarning, match="can be written by others"):
            metalcore.compile_shader(SOURCE.format(name="k", value=8))
        (output,) = compilations
    else:
        monkeypatch.setattr(_device_library, "library_name", lambda: "_device-another.so")
        monkeypatch.setattr(_device_library, "build", lambda path: path.write_bytes(b"the device"))
        assert _device_library.find() is None
        with pytest.warns(RuntimeWarning, match="can be written by others"):
            output = _device_library.find_or_build()
        assert _device_library.find() == output
    assert directory not in output.parents and cache.temporary_directory() in output.parents
    assert not any(directory.iterdir())


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
    assert sorted(os.path.splitext(name)[1] for name in files(directory)) == [".json", ".so"]
    assert all(cache.is_intact(directory / name) for name in files(directory))
    assert sum("-shared" in line for line in log.read_text().splitlines()) == 1
