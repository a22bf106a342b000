"""NVRTC: the library that is used, its options, and its errors."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from metalcore.msl.errors import CompilerNotFoundError, MSLError
from metalcore.msl.language.cuda_source import cuda_source
from metalcore.msl.language.translate import translate
from metalcore.msl.nvidia import nvrtc

pytestmark = pytest.mark.only_on("simulator", "cuda")  # Linux, where NVRTC is
DOUBLE = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }'


@pytest.fixture(scope="module")
def compiler():
    return nvrtc.find()


@pytest.fixture
def only_here(tmp_path, monkeypatch):
    """Makes a directory CUDA's home, and hides every other NVRTC."""
    (tmp_path / "lib64").mkdir()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(nvrtc, "folders", lambda homes: [tmp_path / "lib64"])
    monkeypatch.setattr(nvrtc, "_loaded", lambda: None)
    monkeypatch.setattr(nvrtc, "_of_the_loader", list)
    return tmp_path / "lib64"


def pretend(folder, version):
    """Makes files with the names that an NVRTC of this version has."""
    major = version.split(".")[0]
    for name in (f"libnvrtc.so.{major}", f"libnvrtc-builtins.so.{version}"):
        (folder / name).touch()
    return folder / f"libnvrtc.so.{major}"


def test_its_version_is_known_without_opening_it(compiler):
    told = nvrtc.NVRTC(compiler.path)
    assert told.version >= nvrtc._OLDEST and told._library is None
    assert compiler.compile(DOUBLE, 90)[:4] == b"\x7fELF"
    unnamed = nvrtc.NVRTC(compiler.path)
    unnamed._builtins = list
    assert unnamed.version == told.version


def test_the_newest_builtins_are_its_own(only_here):
    path = pretend(only_here, "13.2")
    pretend(only_here, "13.10")
    assert nvrtc.NVRTC(path).version == (13, 10)
    path.rename(only_here / "libnvrtc.so.13.2.5")
    assert nvrtc.NVRTC(only_here / "libnvrtc.so.13.2.5").version == (13, 2)


def test_one_that_is_no_library(only_here, tmp_path, monkeypatch):
    monkeypatch.setenv("METALCORE_CACHE_DIR", str(tmp_path / "cache"))
    broken = nvrtc.NVRTC(pretend(only_here, "13.0"))
    with pytest.raises(CompilerNotFoundError, match="NVRTC cannot be opened: .*libnvrtc-builtins.so.13.0"):
        broken.compile(DOUBLE, 90)


def test_none(only_here):
    needed = "needs NVRTC 12.6 or newer: pip install nvidia-cuda-nvrtc.*Looked in"
    with pytest.raises(CompilerNotFoundError, match=needed) as error:
        nvrtc.find()
    assert str(only_here) in str(error.value)


@pytest.mark.parametrize("version", ["11.8", "12.5"])
def test_one_that_is_too_old(only_here, version):
    path = pretend(only_here, version)
    (only_here / "libnvrtc.so").symlink_to(path)
    with pytest.raises(CompilerNotFoundError, match=rf"needs NVRTC 12.6 .*Found NVRTC {version} \(.*libnvrtc.so.1"):
        nvrtc.find()


def test_the_newest_in_a_folder(only_here):
    pretend(only_here, "12.8")
    newer = pretend(only_here, "13.1")
    assert (nvrtc.find().path, nvrtc.find().version) == (newer, (13, 1))


def test_pytorchs_release_comes_first(only_here, monkeypatch, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    pretend(only_here, "13.0")
    pytorchs = pretend(other, "12.6")
    monkeypatch.setattr(nvrtc, "folders", lambda homes: [only_here, other])
    monkeypatch.setattr("torch.version.cuda", "12.8")
    monkeypatch.setenv("CUDA_HOME", str(other))  # another search
    assert nvrtc.find().path == pytorchs


def test_the_one_that_is_named(only_here, compiler, monkeypatch, tmp_path):
    monkeypatch.setenv("METALCORE_NVRTC", str(compiler.path))
    assert nvrtc.find().path == compiler.path
    monkeypatch.setenv("METALCORE_NVRTC", str(tmp_path / "nothing.so"))
    with pytest.raises(CompilerNotFoundError, match="nothing.so: cannot open shared object file"):
        nvrtc.find()
    other = next(Path(os.__file__).parent.rglob("*.so"))
    shutil.copy(other, tmp_path / "other.so")
    monkeypatch.setenv("METALCORE_NVRTC", str(tmp_path / "other.so"))
    with pytest.raises(CompilerNotFoundError, match="other.so.*nvrtcVersion"):
        nvrtc.find()


def test_architectures(compiler):
    known = compiler.architectures()
    assert {80, 90} <= set(known)
    assert compiler.target(90) == "sm_90"
    newest = known[-1]
    assert compiler.target(newest + 30) == f"compute_{newest}"
    with pytest.raises(CompilerNotFoundError, match="this GPU has 3.5.*nvidia-cuda-nvrtc-cu12"):
        compiler.target(35)
    ptx = compiler.compile(DOUBLE, newest + 30)
    assert f".target sm_{newest}\n".encode() in ptx and ptx.endswith(b"\0")


def test_threads_compile_at_once(compiler):
    texts = [DOUBLE.replace("2", str(i)) for i in range(8)]
    one_by_one = [compiler.compile(text, 80) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda text: compiler.compile(text, 80), texts)) == one_by_one


def compile_msl(compiler, source, signature="b0"):
    translation = translate(source)
    text, _ = translation.cuda_source([(translation.kernels[0].name, signature)])
    return compiler.compile(text, 90, msl=source)


@pytest.mark.parametrize(
    "source, message",
    [
        (
            "kernel void f(device float* x) {\n  x[0] = y;\n}",
            'program_source:2:10: error: identifier "y" is undefined\n  x\\[0\\] = y;\n         \\^',
        ),
        (
            (
                "#include <metal_stdlib>\nusing namespace metal;\n"
                "kernel void f(device float2* x) {\n  x[0] = float4(1);\n}"
            ),
            "program_source:4:.*\n  x\\[0\\] = float4\\(1\\);",
        ),
        ("kernel void f(device float* x) {\n  x[0] = 1\n}", "program_source:[23]:.*expected a"),
        (
            "#define BAD nothing_of_the_kind\nkernel void f(device float* x) {\n\n  x[0] = BAD;\n}",
            "program_source:4:.*nothing_of_the_kind",
        ),
        (
            "template <typename T> void g(T x) {\n  x.none();\n}\nkernel void f(device float* x) { g(x[0]); }",
            "program_source:2:.*class type",
        ),
        (
            "kernel void f(device float* x) {\n  x[0] = metal::float4(1, x[1], 3).w;\n}",
            "program_source:2:.*too few components for this vector",
        ),
        (
            (
                "#include <metal_stdlib>\nusing namespace metal;\n"
                "kernel void f(device float* x) {\n  x[0] = simd_sum(x);\n}"
            ),
            "program_source:4:",
        ),
    ],
)
def test_errors_show_the_users_line(compiler, source, message):
    with pytest.raises(MSLError, match=message) as error:
        compile_msl(compiler, source)
    assert "metalcore/msl/include" not in str(error.value).split("\n")[0]


def test_errors_in_headers_are_told_where_the_program_instantiates_them():
    log = f"""{nvrtc.INCLUDE}/metal/x.h(3): error: static assertion failed with "no"
    static_assert(false, "no");
    ^
          detected during:
            instantiation of "void h(T) [with T=float]" at line 7 of {nvrtc.INCLUDE}/metal/y.h
            instantiation of "void g(T) [with T=float]" at line 2 of program_source

1 error detected in the compilation of "msl_program"."""
    assert nvrtc.explain(log, "first\nsecond") == 'program_source:2: error: static assertion failed with "no"\nsecond'


def test_an_unbound_argument():
    translation = translate("kernel void f(device float* x, device float* y) { x[0] = y[0]; }")
    with pytest.raises(MSLError, match="kernel 'f': nothing is bound to argument 'y'"):
        cuda_source(translation.program, translation.cuda_kernels(), [("f", "b0")])


def test_a_flag_that_nvrtc_does_not_know(compiler):
    with pytest.raises(MSLError, match="NVRTC .* failed:\n.*--nonsense"):
        compiler.compile(DOUBLE, 90, flags=("--nonsense",))
