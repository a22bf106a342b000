"""Paths name families of kernels, so that two families may have sources of one name, such as a/forward and b/forward.
tests/metal_runtime tests Metal's families."""

import platform
import subprocess
import sys

import pytest

from metalcore import _C
from metalcore.msl.nvidia import cuda
from tools.build.families import kernel_index
from tools.build.linux_kernels import cuda_programs, simulator_libraries
from tools.build.tasks import Tasks

# This kernel takes the place of a built-in one. It adds a number to eight elements.
SOURCE = """
#include <metal_stdlib>
kernel void {kernel}(device const {type}* x [[buffer(0)]], device {type}* y [[buffer(1)]],
                     uint i [[thread_position_in_grid]]) {{
  for (uint j = 0; i == 0 && j < 8; ++j) y[j] = x[j] + {number};
}}
"""
PROGRAM = """
import sys, torch, metalcore, metalcore.simulator
metalcore._C.simulator_set_library_path(sys.argv[1])
for checking in (False, True):
    with metalcore.simulator.checking(checking):
        for type, number in ((torch.float, 1), (torch.half, 2)):
            y = metalcore.silu(torch.zeros(8, dtype=type, device="mps"))
            assert y.tolist() == [number] * 8, (checking, y)
"""


def write(folder, family, **values):
    path = folder / f"{family}.metal"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(SOURCE.format(**values))


@pytest.fixture
def kernels(tmp_path):
    folder = tmp_path / "kernels"
    write(folder, "first/forward", kernel="silu_packed_float", type="float", number=1)
    write(folder, "second/forward", kernel="silu_packed_half", type="half", number=2)
    return folder


@pytest.fixture
def tasks(tmp_path):
    return Tasks(tmp_path / "build")


def test_the_simulator_finds_their_kernels(kernels, tasks, monkeypatch):
    monkeypatch.setenv("METALCORE_ISA", _C.simulator_info()["isa"])
    assert len([*kernel_index(tasks, kernels), *simulator_libraries(tasks, kernels)]) == 6
    tasks.run()
    command = [sys.executable, "-c", PROGRAM, str(tasks.out / "lib")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_cuda_finds_their_kernels(kernels, tasks, monkeypatch):
    cuda_programs(tasks, kernels)
    tasks.run()
    monkeypatch.setattr(cuda, "_LIBRARY", tasks.out / "lib" / "cuda")
    for function in (cuda.builtin_programs, cuda._families):
        monkeypatch.setattr(cuda, function.__name__, function.__wrapped__)
    assert list(cuda.builtin_programs()) == ["first/forward", "second/forward"]
    for kernel, number in (("silu_packed_float", 1), ("silu_packed_half", 2)):
        program, kernels = cuda._builtin_program(kernel)._load()
        assert f"+ {number}" in program and list(kernels) == [kernel]


def test_kernels_of_one_name_are_refused(kernels, tasks):
    write(kernels, "third/forward", kernel="silu_packed_half", type="half", number=3)
    kernel_index(tasks, kernels)
    with pytest.raises(SystemExit) as refusal:
        tasks.run()
    assert str(refusal.value) == (
        f"two kernels are named 'silu_packed_half', in {kernels}/second/forward.metal and in "
        f"{kernels}/third/forward.metal"
    )


def test_the_default_and_all_sets(kernels, tmp_path, monkeypatch):
    def outputs():
        tasks = Tasks(tmp_path / "other")
        return [path.relative_to(tasks.out).as_posix() for path in simulator_libraries(tasks, kernels)]

    monkeypatch.delenv("METALCORE_ISA", raising=False)
    assert outputs() == ["lib/on-first-use"]
    monkeypatch.setenv("METALCORE_ISA", "all")
    sets = 3 if platform.machine() == "x86_64" else 1
    assert len(outputs()) == 2 * (sets + 1)


def test_kernels_that_count_on_subnormal_numbers_have_another_variant(tmp_path, monkeypatch):
    monkeypatch.setenv("METALCORE_ISA", "native")
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    (kernels / "plain.metal").write_text("kernel void f(device int* x) { x[0] = 0; }\n")
    (kernels / "packed.metal").write_text('#include "formats.h"\nkernel void g(device int* x) { x[0] = KEPT; }\n')
    (kernels / "formats.h").write_text("#if METALCORE_HALF_SUBNORMALS\n#define KEPT 1\n#else\n#define KEPT 0\n#endif\n")
    outputs = simulator_libraries(Tasks(tmp_path / "build"), kernels)
    places = sorted(path.relative_to(tmp_path / "build/out/lib").as_posix() for path in outputs)
    assert [place for place in places if "-flushing/" in place] == [
        place.replace("/", "-flushing/") for place in places if "packed" in place and "-flushing" not in place
    ]
    assert len(places) == 6
