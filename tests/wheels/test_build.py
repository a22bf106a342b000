"""The parts of tools/build that setup.py uses: the ops' sources, how many compilers run, what is built again."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from metalcore import _C
from tools.build import c_library, front_end, linux_kernels, objects, places, tasks
from tools.build.places import ROOT, WORK
from tools.build.tasks import Tasks


def test_every_source_of_this_platform_is_compiled():
    found = {path.relative_to(ROOT / "csrc") for path in (ROOT / "csrc").rglob("*.cpp")}
    elsewhere = {path for path in found if path.parts[0] in ("simulated_device", "c_api")}
    of_c = {path for path in (ROOT / "csrc" / "c_api").rglob("*") if path.suffix in (".cpp", ".mm")}
    everywhere = c_library.sources([path.name for path in (ROOT / "csrc" / "backends").iterdir()])
    assert {path.relative_to(ROOT).as_posix() for path in of_c} <= {*everywhere}
    compiled = objects.read_compile_commands(WORK)
    assert {path.with_suffix("").as_posix() for path in found - elsewhere} == compiled.keys()
    for source, command in compiled.values():
        assert source.exists() and not {"-c", "-o", "-MMD", str(source)} & {*command}


@pytest.mark.parametrize(
    "files, gigabytes",
    [
        ({"proc/meminfo": "MemTotal: 99 kB\nMemAvailable:    5242880 kB\n"}, 5),
        ({"proc/meminfo": "MemAvailable: 5242880 kB\n", "sys/fs/cgroup/memory.max": "3221225472\n"}, 3),
        ({"proc/meminfo": "MemAvailable: 5242880 kB\n", "sys/fs/cgroup/memory.max": "max\n"}, 5),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": "1073741824\n"}, 1),
    ],
    ids=["machine", "container", "container without a limit", "older container"],
)
def test_available_memory(tmp_path, files, gigabytes):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert tasks.available_memory(tmp_path) == min(gigabytes << 30, physical)


def test_jobs(monkeypatch):
    monkeypatch.setattr(tasks, "_cores", lambda: 8)
    monkeypatch.setattr(tasks, "available_memory", lambda: 7 << 30)
    monkeypatch.delenv("METALCORE_JOBS", raising=False)
    assert tasks.jobs() == 3
    monkeypatch.setattr(tasks, "available_memory", lambda: 99 << 30)
    assert tasks.jobs() == 8
    monkeypatch.setattr(tasks, "available_memory", lambda: 1 << 30)
    assert tasks.jobs() == 1
    monkeypatch.setenv("METALCORE_JOBS", "5")
    assert tasks.jobs() == 5
    for wrong in ("0", "many", "-1"):
        monkeypatch.setenv("METALCORE_JOBS", wrong)
        with pytest.raises(SystemExit, match="METALCORE_JOBS"):
            tasks.jobs()


def test_the_native_instruction_set_is_what_the_simulator_chooses(tmp_path, monkeypatch):
    built = _C.simulator_info()["isa"]
    assert built == linux_kernels.native()
    monkeypatch.setattr(linux_kernels, "PLATFORM", "linux-x86_64")
    flags = "flags\t\t: fpu sse2 fma avx2 bmi1 bmi2"
    for text, expected in (
        (f"{flags} avx512f avx512cd avx512bw avx512dq avx512vl\n", "x86-64-v4"),
        (f"{flags} avx512f\n", "x86-64-v3"),
        ("flags\t\t: fpu sse2 avx2\n", "x86-64"),
        ("nothing\n", "x86-64"),
    ):
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{text}")
        assert linux_kernels.native(tmp_path / "cpuinfo") == expected


def test_tasks_run_where_something_changed(tmp_path):
    source, made = tmp_path / "source", []

    def build(signature):
        tasks = Tasks(tmp_path)
        output = tasks.add("a/b", [source], signature, lambda output: made.append(output.write_text("")))
        tasks.run()
        assert output.exists() and tasks.signature("a/b") == signature
        return len(made)

    source.touch()
    assert [build(["-O1"]), build(["-O1"]), build(["-O2"])] == [1, 1, 2]
    later = source.stat().st_mtime + 100
    os.utime(source, (later, later))
    assert build(["-O2"]) == 3


@pytest.mark.parametrize("with_header", [False, True], ids=["alone", "precompiled"])
def test_an_object_is_compiled_again_where_a_header_changed(tmp_path, monkeypatch, with_header):
    monkeypatch.setattr(objects, "ROOT", tmp_path)
    monkeypatch.setattr(objects, "_HEADER", tmp_path / "precompiled.h")
    for name, text in {"precompiled.h": "struct Common {};", "own.h": "", "other.h": ""}.items():
        (tmp_path / name).write_text(text)
    common = "" if with_header else '#include "precompiled.h"\n'
    for name in ("own", "other"):
        (tmp_path / f"{name}.cpp").write_text(f'{common}#include "{name}.h"\nCommon {name};\n')
    extension = SimpleNamespace(
        objects="objects", sources=["own.cpp", "other.cpp"], extra_compile_args=["-O1", "-fPIC"]
    )
    command = front_end.compiler()

    def compiled():
        tasks = Tasks(tmp_path / "build")
        before = {path: path.stat().st_mtime_ns for path in tasks.out.rglob("*.o")}
        header = None
        if with_header:
            header = objects.precompile(tasks, tasks.out / "common.h", [*command, *extension.extra_compile_args])
            tasks.run()
        (outputs,) = objects.add_objects(tasks, [extension], command, [header])
        tasks.run()
        return sorted(path.stem for path in outputs if path.stat().st_mtime_ns != before.get(path))

    def changed(name):
        (tmp_path / name).touch()
        return compiled()

    assert compiled() == ["other", "own"] and compiled() == []
    assert changed("own.h") == ["own"]
    assert changed("precompiled.h") == ["other", "own"] and compiled() == []


def test_two_libraries_share_what_needs_no_headers_of_pytorch(tmp_path, monkeypatch):
    monkeypatch.setattr(objects, "ROOT", tmp_path)
    sources = {"alone.cpp": '#include "plain.h"\n', "with_tensors.cpp": '#include "tensors.h"\n', "only_here.cpp": ""}
    headers = {"plain.h": "#include <vector>\n", "tensors.h": '#include "plain.h"\n#include <torch/tensor.h>\n'}
    for name, text in (sources | headers).items():
        (tmp_path / name).write_text(text)
    extensions = [
        SimpleNamespace(objects="first", sources=[*sources], extra_compile_args=[]),
        SimpleNamespace(objects="second", sources=["with_tensors.cpp", "alone.cpp"], extra_compile_args=[]),
    ]
    outputs = objects.add_objects(Tasks(tmp_path), extensions, ["c++"], [None, None])
    assert [[path.relative_to(tmp_path / "out").as_posix() for path in each] for each in outputs] == [
        ["second/alone.o", "first/only_here.o", "first/with_tensors.o"],
        ["second/alone.o", "second/with_tensors.o"],
    ]


def test_all_errors_are_said(tmp_path):
    def fail(output):
        raise RuntimeError(f"{output.name} failed")

    tasks = Tasks(tmp_path)
    tasks.add("a", [], [], fail), tasks.add("b", [], [], fail)
    tasks.add("c", [], [], lambda output: output.write_text(""))
    with pytest.raises(SystemExit, match="^a failed\nb failed$"):
        tasks.run()
    assert (tasks.out / "c").exists()


@pytest.mark.parametrize(
    "free_threaded, macos, machine, says",
    [
        (False, "", "x86_64", ""),
        (False, "14.0", "arm64", ""),
        (False, "26.1", "arm64", ""),
        (True, "", "aarch64", "is free-threaded"),
        (True, "15.2", "arm64", "is free-threaded"),
        (False, "15.2", "x86_64", "a Python for arm64"),
        (False, "13.7.1", "arm64", "macOS 13.7.1. The kernels need Metal 3.1, which macOS 14.0"),
    ],
)
def test_where_nobody_could_use_the_result(free_threaded, macos, machine, says):
    found = places.unsupported(free_threaded, macos, machine)
    assert says in found and bool(found) == bool(says)


@pytest.mark.parametrize("command", ["egg_info", "bdist_wheel"])
def test_setup_refuses_a_free_threaded_python(command):
    program = (
        "import runpy, sys, sysconfig\n"
        "sysconfig.get_config_vars()['Py_GIL_DISABLED'] = 1\n"
        f"sys.argv = ['setup.py', {command!r}]\n"
        "runpy.run_path('setup.py', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("metalcore cannot be built here: this Python 3.") and "free-threaded" in done.stderr


def test_without_a_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SystemExit, match=r"^building metalcore needs a C\+\+ compiler .*`xcode-select --install`"):
        front_end.compiler()
