"""The compiler that find_compiler() finds."""

import shutil

import pytest

from metalcore.msl.errors import CompilerNotFoundError
from metalcore.msl.runtime import host


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_a_newer_compiler_under_a_name_of_its_own(tmp_path, monkeypatch):
    real = shutil.which(host.find_compiler().command[0])
    old = "echo '#define __GNUC__ 11'; echo '#define __GNUC_MINOR__ 4'; echo '#define __GNUC_PATCHLEVEL__ 0'"
    script(tmp_path / "g++", old)
    script(tmp_path / "c++", old)
    script(tmp_path / "g++-12", f'exec {real} "$@"')
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert host.find_compiler().command == ["g++-12"]


def test_the_error_tells_what_was_tried(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "'g++")
    tried = r"needs a C\+\+ compiler .*'g\+\+: No closing quotation; c\+\+: not found"
    with pytest.raises(CompilerNotFoundError, match=tried):
        host.find_compiler()


@pytest.mark.parametrize("name", [name for name in (*host._NAMES, *host._VERSIONED) if shutil.which(name)])
def test_the_headers_suit_every_compiler_here(name, monkeypatch):
    monkeypatch.setenv("CXX", name)
    if host.find_compiler().command == [name]:  # else it is too old
        host.check_source('#include "host/prelude.h"\n')
