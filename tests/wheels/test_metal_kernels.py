"""The kernels' files for Metal: sources from which instantiations can be dropped, and binaries where Apple's compiler
takes the sources. (tests/metal_runtime compiles the sources.)"""

import os

import pytest

from tools.build.metal_kernels import metal_kernels, separate
from tools.build.tasks import Tasks

TEMPLATE = """#include <metal_stdlib>
#define ARGUMENTS device const T*, device T*, uint
template <typename T>
kernel void twice(device const T* x [[buffer(0)]], device T* y [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  y[i] = 2 * x[i];
}
"""
MACROS = """#define INSTANTIATE(name, T)                                   \\
  template [[host_name("twice" name)]] [[kernel]] void twice<T>( \\
      device const T*, device T*, uint);
#define BOTH(half_name) INSTANTIATE("_float", float) INSTANTIATE(half_name, half)
BOTH("_half")
template [[host_name("twice_int")]] [[kernel]] void twice<int>(device const int*, device int*, uint);
kernel void plain(device int* x [[buffer(0)]]) { x[0] = 0; }
"""


def test_each_instantiation_is_a_line():
    separated = separate(TEMPLATE + MACROS, "twice.metal")
    head, lines = separated.split('#line 1 "instantiations"\n')
    assert lines.splitlines() == [
        f'/* kernel twice_{name} */ template [[host_name("twice_{name}")]] [[kernel]] void twice < {type} >'
        f"(device const {type} *, device {type} *, uint);"
        for name, type in (("float", "float"), ("half", "half"), ("int", "int"))
    ]
    assert "host_name" not in head and "kernel void plain" in head
    assert len(head.splitlines()) == len((TEMPLATE + MACROS).splitlines())  # messages name the right lines


def test_sources_without_instantiations_stay():
    source = "kernel void plain(device int* x [[buffer(0)]]) { x[0] = 0; }\n"
    assert separate(source, "plain.metal") == source


def test_a_macro_that_does_more_is_refused():
    mixed = TEMPLATE + (
        "#define MORE(T) constant int made_##T = 0; "
        'template [[host_name("twice_" #T)]] [[kernel]] void twice<T>(device const T*, device T*, uint);\nMORE(int)\n'
    )
    with pytest.raises(RuntimeError, match=r"twice\.metal: a macro that instantiates a kernel"):
        separate(mixed, "twice.metal")


# Apple's compiler: it rejects sources that hold the word, and options of which METAL_KNOWS is no part.
XCRUN = """#!/bin/sh
echo "$*" >> "$(dirname "$0")/log"
case "$*" in *-fmetal-math*) [ "$METAL_KNOWS" = -fmetal-math ] || exit 1 ;; esac
while [ $# -gt 0 ]; do
  case "$1" in
    -o) output="$2" ;;
    *.metal) grep -q rejected "$1" && { echo "$1:1: error: rejected" >&2; exit 1; } ;;
  esac
  shift
done
[ -z "$output" ] || echo MTLB > "$output"
"""


@pytest.fixture
def xcrun(tmp_path, monkeypatch):
    (tmp_path / "xcrun").write_text(XCRUN)
    (tmp_path / "xcrun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize(
    "known, options",
    [("-fmetal-math", "-fmetal-math-mode=safe -fmetal-math-fp32-functions=precise"), ("", "-fno-fast-math")],
)
def test_binaries_are_made_without_fast_math(xcrun, tmp_path, monkeypatch, known, options):
    monkeypatch.setenv("METAL_KNOWS", known)
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "good.metal").write_text("kernel void f(device int* x [[buffer(0)]]) { x[0] = 0; }\n")
    tasks = Tasks(tmp_path / "build")
    metal_kernels(tasks, folder)
    tasks.run()
    made = (tmp_path / "log").read_text().splitlines()[-1]
    assert made.endswith("good.metallib") and f" {options} " in made and "-std=metal3.1" in made


def test_a_kernel_that_apples_compiler_rejects_costs_its_binary(xcrun, tmp_path, capfd):
    folder = tmp_path / "kernels"
    folder.mkdir()
    for family, text in (("good", "\n"), ("bad", "// rejected\n")):
        (folder / f"{family}.metal").write_text("kernel void f(device int* x [[buffer(0)]]) { x[0] = 0; }" + text)

    def build():
        tasks = Tasks(tmp_path / "build")
        outputs = metal_kernels(tasks, folder)
        tasks.run()
        assert {output.name: output.exists() for output in outputs} == {
            "good.metal": True,
            "good.metallib": True,
            "bad.metal": True,
            "bad.metallib": fixed,
        }
        assert {path.name for path in tasks.left_out} == (set() if fixed else {"bad.metallib"})
        return capfd.readouterr().err

    fixed = False
    for _ in range(2):  # the next build tries again
        said = build()
        assert "bad.metal:1: error: rejected" in said
        assert "warning: lib/metal/bad.metallib is left out (its source is compiled on first use)" in said
    (folder / "bad.metal").write_text("kernel void f(device int* x [[buffer(0)]]) { x[0] = 0; }\n")
    fixed = True
    assert build() == ""
