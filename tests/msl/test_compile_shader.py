"""compile_shader: the compiler that it finds, what compiles, into which kernels, and the errors of what does not
compile."""

import math
import shutil

import pytest
import torch

import metalcore
from metalcore.msl.errors import CompilerNotFoundError, MSLError
from metalcore.msl.runtime import host

FILL = (
    "kernel void fill(device float* out, constant float& value, uint i [[thread_position_in_grid]]) { out[i] = value; }"
)


def test_library_names_its_kernels():
    library = metalcore.compile_shader(FILL + "kernel void other(device float* x) { x[0] = 1; }")
    assert dir(library) == ["fill", "other"] and list(library) == ["fill", "other"]
    assert library.fill is library.fill
    assert not hasattr(library, "missing")
    with pytest.raises(RuntimeError, match="Failed to create function state object for: missing"):
        library.missing  # noqa: B018


@pytest.mark.only_on("simulator")
def test_torch_mps_compile_shader_is_the_same(device):
    x = torch.zeros(4, device=device)
    torch.mps.compile_shader(FILL).fill(x, 2.0)
    assert x.tolist() == [2, 2, 2, 2]


@pytest.mark.only_on("simulator")
@pytest.mark.parametrize(
    "source, message",
    [
        ("Syntax error", "program_source:1: error: expected ';'"),
        (
            "kernel void f(device float* x) {\n  x[0] = y;\n}",
            "program_source:2:10: error: 'y' was not declared.*\n  x\\[0\\] = y;\n         \\^",
        ),
        (
            (
                "#include <metal_stdlib>\nusing namespace metal;\n"
                "kernel void f(device float2* x) {\n  x[0] = float4(1);\n}"
            ),
            "program_source:4:",
        ),
        ("kernel void f(device float* x) {\n  x[0] = 1\n}", "program_source:[23]:.*expected ';'"),
        (
            "#define BAD nothing_of_the_kind\nkernel void f(device float* x) {\n\n  x[0] = BAD;\n}",
            "program_source:4:.*nothing_of_the_kind",
        ),
        (
            "template <typename T> void g(T x) {\n  x.none();\n}\nkernel void f(device float* x) { g(x[0]); }",
            "program_source:2:",
        ),
    ],
)
def test_errors_show_the_users_line(source, message):
    with pytest.raises(SyntaxError, match=message) as caught:
        metalcore.compile_shader(source)
    assert isinstance(caught.value, MSLError) and isinstance(caught.value, RuntimeError)
    assert "include/metal" not in str(caught.value).split("\n")[0]


def test_source_must_be_text():
    with pytest.raises(TypeError, match="source must be a str, not bytes"):
        metalcore.compile_shader(FILL.encode())
    with pytest.raises(MSLError, match="program_source:2: error: a character is no Unicode: surrogates"):
        metalcore.compile_shader("\n// \ud800")
    with pytest.raises(TypeError, match="include_dirs must be a sequence of directories"):
        metalcore.compile_shader("", include_dirs="/tmp")
    with pytest.raises(TypeError, match="aligned must be a bool, not int"):
        metalcore.compile_shader("", aligned=1)
    with pytest.raises(TypeError, match="constants must be a dict, not list"):
        metalcore.compile_shader("", constants=[])


@pytest.mark.parametrize(
    "constants, error, message",
    [
        ({0: 2**40}, MSLError, "1: error: function constant 'n' is int: 1099511627776 is not -2147483648 to"),
        ({"n": 3.7}, MSLError, "function constant 'n' is int: 3.7 is a float"),
        ({0: math.nan}, MSLError, "'n' is int: nan is a float"),
        ({0: (1, 2)}, MSLError, r"'n' is int: \(1, 2\) is not 1 number"),
        ({0: 1, "n": 1}, MSLError, "'n' is given by its index and by its name"),
        ({1: -1}, MSLError, "'u' is uint: -1 is not 0 to 4294967295"),
        ({2: 2}, MSLError, "'b' is bool: 2 is not 0 to 1"),
        ({3: 1e5}, MSLError, "'h' is half: 100000.0 is too large"),
        ({3: True}, MSLError, "'h' is half: True is a bool"),
        ({4: 1}, MSLError, "'v' is uint2: 1 is not 2 numbers"),
        ({4: (1, 2, 3)}, MSLError, r"'v' is uint2: \(1, 2, 3\) is not 2 numbers"),
        ({9: 1}, MSLError, "no function constant 9"),
        ({0: "3"}, TypeError, "constant 0 must be a bool, int, float"),
        ({0: None}, TypeError, "constant 0 must be a bool, int, float"),
        ({True: 1}, TypeError, "not by True"),
        ([1], TypeError, "constants must be a dict, not list"),
    ],
)
def test_constants_that_are_none_of_their_types(constants, error, message):
    source = (
        "constant int n [[function_constant(0)]]; constant uint u [[function_constant(1)]]; "
        "constant bool b [[function_constant(2)]]; constant half h [[function_constant(3)]]; "
        "constant metal::uint2 v [[function_constant(4)]];\nkernel void k(device float* x) {}"
    )
    with pytest.raises(error, match=message.replace("uint2:", "metal :: uint2:")):
        metalcore.compile_shader(source, constants=constants)


def test_include_dirs(device, tmp_path):
    header = tmp_path / "value.h"
    source = '#include "value.h"\nkernel void k(device float* x) { x[0] = VALUE; }'
    x = torch.zeros(1, device=device)
    for value in (3, 4):  # a changed header is noticed
        header.write_text(f"#define VALUE {value}\n")
        metalcore.compile_shader(source, include_dirs=[tmp_path]).k(x)
        assert x.item() == value
    header.write_text("\nint broken(;\n")
    with pytest.raises(MSLError, match=r"value\.h:2: error: expected '\)'"):
        metalcore.compile_shader(source, include_dirs=[tmp_path])
    with pytest.raises(MSLError, match="program_source:1: error: 'value.h' file not found"):
        metalcore.compile_shader(source)


def test_a_program_of_many_kernels_compiles_those_that_are_called(device):
    source = "".join(f"kernel void k{i}(device float* x) {{ x[0] = {i}; }}\n" for i in range(100))
    library = metalcore.compile_shader(source)
    x = torch.zeros(1, device=device)
    for i in (7, 99):
        getattr(library, f"k{i}")(x)
        assert x.item() == i
    assert len(dir(library)) == 100


@pytest.mark.only_on("simulator")
def test_without_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompilerNotFoundError, match="needs a C.. compiler .*no-such-compiler: not found"):
        metalcore.compile_shader(FILL.replace("fill", "never_compiled_before"))


@pytest.mark.only_on("simulator")
def test_an_old_compiler_is_refused(monkeypatch, tmp_path):
    old = tmp_path / "old-g++"
    old.write_text(
        "#!/bin/sh\necho '#define __GNUC__ 9'\necho '#define __GNUC_MINOR__ 4'\necho '#define __GNUC_PATCHLEVEL__ 0'\n"
    )
    old.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", str(old))
    with pytest.raises(CompilerNotFoundError, match="old-g.*: gcc 9.4.0"):
        metalcore.compile_shader(FILL.replace("fill", "never_compiled_before"))


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
