"""Builds metalcore: the ops (_C.abi3.so), the built-in kernels (lib/) and, in place, the simulated device.

Only what changed is rebuilt: every output remembers the command that made it and is compared in time with what it was
made from. Environment:
  METALCORE_JOBS  compilers to run at once (2)
  METALCORE_ISA   instruction sets of the built-in kernels, comma separated (all of this architecture's); empty for
                  none, where only a GPU runs kernels
  METALCORE_TORCH PyTorch's package, where it is not the one of this Python: headers and libraries of another platform
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
# The platform that is built for: Python's own, unless _PYTHON_HOST_PLATFORM says otherwise (tools/mac_check).
MACOS = sysconfig.get_platform().startswith("macosx")
MACOS_VERSION = "14.0"  # the first with Metal 3.1
WORK = ROOT / "build" / ("metalcore-macos" if MACOS else "metalcore")
PACKAGE = ROOT / "metalcore"
JOBS = int(os.environ.get("METALCORE_JOBS", "2"))
TORCH_2_10 = "0x020a000000000000"
PYTHON_3_10 = "0x030a0000"
BACKENDS = ROOT / "csrc" / "backends"
SIMULATOR = BACKENDS / "simulator"
# The simulator with its kernels and the CUDA backend are Linux's.
LINUX = sysconfig.get_platform().startswith("linux")

sys.path.insert(0, str(PACKAGE))  # msl by itself: importing metalcore would need what is being built
from msl import cuda, host  # noqa: E402
from msl.inline_headers import inline_headers  # noqa: E402
from msl.translate import translate  # noqa: E402


class Tasks:
    """Commands with their inputs and outputs; runs those that are out of date, some at a time."""

    def __init__(self):
        self.pending = []

    def add(self, name, output, inputs, signature, action):
        """`action()` makes `output` out of `inputs`; `signature` is whatever else the output depends on."""
        stamp = WORK / "stamps" / (name.replace("/", "_") + ".json")
        signature = json.dumps(signature)
        if output.exists() and stamp.exists() and stamp.read_text() == signature:
            made = output.stat().st_mtime
            if all(path.exists() and path.stat().st_mtime <= made for path in inputs):
                return

        def task():
            print(f"building {name}", flush=True)
            output.parent.mkdir(parents=True, exist_ok=True)
            stamp.unlink(missing_ok=True)
            action()
            stamp.parent.mkdir(parents=True, exist_ok=True)
            stamp.write_text(signature)

        self.pending.append(task)

    def run(self):
        """The errors. One of them does not stop the rest."""
        with ThreadPoolExecutor(JOBS) as pool:
            failures = [future.exception() for future in [pool.submit(task) for task in self.pending]]
        self.pending.clear()
        return [str(failure) for failure in failures if failure]


def compiler():
    """The command of the C++ compiler: the one that compile_shader would use."""
    return host.find_compiler().command


def run(command):
    if subprocess.run(command).returncode:
        raise RuntimeError("failed: " + " ".join(map(str, command)))


def dependencies(depfile, source):
    """The files that a compiler's -MMD output names; just the source where there is none yet."""
    if not depfile.exists():
        return [source]
    names = depfile.read_text().replace("\\\n", " ").split(":", 1)[1].split()
    return [Path(name) for name in names]


def torch_package():
    return Path(os.environ.get("METALCORE_TORCH") or importlib.util.find_spec("torch").submodule_search_locations[0])


def ops_extension(tasks):
    """_C.abi3.so: stable ABI and limited API only, so the one binary serves every torch >= 2.10 and Python >= 3.10."""
    torch = torch_package()
    folders = [ROOT / "csrc" / folder for folder in ("ops", "ops/linalg", "gpu", "python")]
    flags = [
        "-std=c++20",
        "-O2",
        "-fPIC",
        "-fvisibility=hidden",
        "-Wall",
        "-Wno-unknown-pragmas",
        f"-DTORCH_TARGET_VERSION={TORCH_2_10}",
        f"-DPy_LIMITED_API={PYTHON_3_10}",
        f"-I{PACKAGE / 'msl' / 'include'}",
    ]
    libraries = [f"-L{torch / 'lib'}", "-ltorch_cpu", "-ltorch"]
    link = ["-shared"]
    if MACOS:
        folders.append(BACKENDS / "mps")
        platform_flags = ["-arch", "arm64", f"-mmacosx-version-min={MACOS_VERSION}"]
        # Clang turned sized deallocation on in version 19, Apple's at another time: one binary whichever builds it.
        flags += [*platform_flags, "-DMETALCORE_MPS=1", "-fno-sized-deallocation"]
        # Python's functions are in the process that loads the extension.
        link = [*platform_flags, "-bundle", "-Wl,-undefined,dynamic_lookup"]
        libraries += ["-framework", "Metal", "-framework", "Foundation"]
    if LINUX:
        folders += [SIMULATOR, BACKENDS / "cuda"]
        flags += ["-DMETALCORE_SIMULATOR=1", "-DMETALCORE_CUDA=1"]
        libraries += ["-ldl", "-pthread"]
    for path in (torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_path("include")):
        flags += ["-isystem", str(path)]

    objects = []
    for source in sorted(path for folder in folders for path in folder.iterdir() if path.suffix in (".cpp", ".mm")):
        name = source.relative_to(ROOT / "csrc").with_suffix("").as_posix()
        target = WORK / "objects" / (name + ".o")
        depfile = target.with_suffix(".d")
        command = [*compiler(), *flags, "-MMD", "-MF", str(depfile), "-c", str(source), "-o", str(target)]
        tasks.add(
            name,
            target,
            dependencies(depfile, source),
            [command, (torch / "version.py").read_text()],
            lambda command=command: run(command),
        )
        objects.append(target)
    if errors := tasks.run():
        raise SystemExit("\n".join(errors))

    output = WORK / "out" / "_C.abi3.so"
    command = [*compiler(), *link, *map(str, objects), "-o", str(output), *libraries]
    tasks.add("_C", output, objects, command, lambda: run(command))
    return {output: "_C.abi3.so"}


def metal_kernels(tasks):
    """lib/metal: each family's source in one piece, its .metallib where Apple's compiler is at hand, and the index that
    tells which family a kernel is in."""
    if not MACOS:
        return {}
    folder = ROOT / "kernels"
    sources = sorted(folder.rglob("*.metal"))
    has_metal = (
        shutil.which("xcrun")
        and subprocess.run(["xcrun", "-sdk", "macosx", "metal", "--version"], capture_output=True).returncode == 0
    )
    outputs = {}

    def text(source):
        return inline_headers(source.read_text(encoding="utf-8"), source.name, [source.parent, folder])

    def add(name, inputs, signature, action):
        output = WORK / "out" / "lib" / "metal" / name
        tasks.add(f"metal/{name}", output, inputs, signature, lambda: action(output))
        outputs[output] = f"lib/metal/{name}"

    def index(output):
        families = {source.stem: translate(text(source), filename=source.name).kernels for source in sources}
        output.write_text(
            "".join(
                " ".join([family, *(kernel.name for kernel in kernels)]) + "\n" for family, kernels in families.items()
            )
        )

    add("index", [path for source in sources for path in with_includes(source)], "index", index)
    for source in sources:
        add(
            f"{source.stem}.metal",
            with_includes(source),
            "source",
            lambda output, source=source: output.write_text(text(source)),
        )
        if has_metal:
            command = [
                "xcrun",
                "-sdk",
                "macosx",
                "metal",
                "-std=metal3.1",
                "-fno-fast-math",
                "-O2",
                f"-mmacosx-version-min={MACOS_VERSION}",
                f"-I{folder}",
                str(source),
                "-o",
            ]
            add(
                f"{source.stem}.metallib",
                with_includes(source),
                command,
                lambda output, command=command: run([*command, str(output)]),
            )
    return outputs


def kernel_libraries(tasks):
    """lib/<isa>/<family>.so and lib/checking/<family>.so: the built-in kernels, translated and compiled."""
    if not LINUX:
        return {}
    baseline, *_ = all_sets = instruction_sets()
    wanted = [isa for isa in os.environ.get("METALCORE_ISA", ",".join(all_sets)).split(",") if isa]
    if unknown := sorted(set(wanted) - set(all_sets)):
        raise SystemExit(
            f"METALCORE_ISA: the simulator has no kernels for {', '.join(unknown)}; it has them for "
            f"{', '.join(all_sets)}"
        )
    sets = [*((isa, isa, False) for isa in wanted), ("checking", baseline, True)] if wanted else []
    outputs = {}
    for source in sorted((ROOT / "kernels").rglob("*.metal")):
        for folder, isa, checking in sets:
            name = f"lib/{folder}/{source.stem}.so"
            output = WORK / "out" / name
            tasks.add(
                name,
                output,
                [*with_includes(source), *translator()],
                [isa, checking, compiler()],
                lambda source=source, output=output, isa=isa, checking=checking: host.build(
                    source, output, isa=isa, checking=checking, include_dirs=[ROOT / "kernels"]
                ),
            )
            outputs[output] = name
    return outputs


def cuda_programs(tasks):
    """lib/cuda/<family>.cu and .json: the built-in kernels, translated; NVRTC compiles them where they are used."""
    if not LINUX:
        return {}
    outputs = {}
    for source in sorted((ROOT / "kernels").rglob("*.metal")):
        name = f"lib/cuda/{source.stem}.cu"
        output = WORK / "out" / name
        tasks.add(
            name,
            output,
            [*with_includes(source), *translator()],
            [],
            lambda source=source, output=output: cuda.build(source, output, root=ROOT),
        )
        outputs |= {output: name, output.with_suffix(".json"): name.replace(".cu", ".json")}
    return outputs


def translator():
    """The files that every translated program depends on."""
    folder = PACKAGE / "msl"
    return [path for path in [*folder.glob("*.py"), *(folder / "include").rglob("*")] if path.is_file()]


def instruction_sets():
    machine = sysconfig.get_platform().split("-")[-1]
    return ["x86-64", "x86-64-v3", "x86-64-v4"] if machine == "x86_64" else [machine]


def with_includes(source, seen=()):
    """A kernel's source and the headers of ours that it includes, directly or not."""
    found = [source]
    for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', source.read_text(encoding="utf-8"), re.MULTILINE):
        for folder in (source.parent, ROOT / "kernels"):
            path = folder / name
            if path.exists():
                if path not in seen:
                    found += with_includes(path, (*seen, source))
                break
    return found


def simulated_device(tasks):
    """The `mps` device on Linux, for the PyTorch at hand, where the package is used in place. Wheels have its sources:
    an isolated build's PyTorch is not the one that runs."""
    if not LINUX:
        return {}
    import torch

    path = PACKAGE / "_device_library.py"
    spec = importlib.util.spec_from_file_location("_device_library", path)
    device = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(device)
    output = WORK / "out" / "simulator" / device.library_name()
    tasks.add(
        "simulated_device",
        output,
        [*device.sources(), path],
        [torch.__version__, output.name, compiler()],
        lambda: device.build(output),
    )
    return {output: f"simulator/{output.name}"}


class Build(build_ext):
    def run(self):
        tasks = Tasks()
        outputs = {**ops_extension(tasks), **kernel_libraries(tasks), **cuda_programs(tasks), **metal_kernels(tasks)}
        if self.inplace and not self.editable_mode:  # pip's editable build may be an isolated one
            outputs |= simulated_device(tasks)
        errors = tasks.run()
        # In place (editable) or into the tree that becomes the wheel.
        package = PACKAGE if self.inplace else Path(self.build_lib) / "metalcore"
        for output, name in outputs.items():
            if output.exists():
                copy(output, package / name)
        # Libraries of another build would be older than the rest, and the best set at hand is what runs; programs of
        # kernels that are gone would still be found.
        built = {package / name for name in outputs.values()}
        for path in sorted((package / "lib").rglob("*"), reverse=True):
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
            elif path.is_file() and path not in built:
                path.unlink()
        if errors:
            raise SystemExit("\n".join(errors))
        if not self.inplace:
            copy_tree(ROOT / "kernels", package / "kernels")
            if LINUX:
                for path in (*(ROOT / "csrc" / "simulated_device").iterdir(), SIMULATOR / "fault.h"):
                    copy(path, package / "simulator" / "csrc" / path.name)

    def get_outputs(self):
        return []


def copy(source, target):
    """Replaces the target as a whole: a process that has the old library open keeps it."""
    if target.exists() and target.stat().st_mtime >= source.stat().st_mtime:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copy2(source, temporary)
    os.replace(temporary, target)


def copy_tree(source, target):
    for path in source.rglob("*"):
        if path.is_file():
            copy(path, target / path.relative_to(source))


class Wheel(bdist_wheel):
    def finalize_options(self):
        self.py_limited_api = "cp310"
        if MACOS:
            self.plat_name = f"macosx_{MACOS_VERSION.replace('.', '_')}_arm64"
        super().finalize_options()

    def run(self):
        # What an earlier wheel left there, and is gone from the sources, would come along.
        shutil.rmtree(self.get_finalized_command("build").build_lib, ignore_errors=True)
        super().run()


setup(
    packages=find_packages(include=["metalcore", "metalcore.*"]),
    py_modules=["metalcore_autoload"],
    package_data={"metalcore": ["py.typed", "**/*.pyi", "msl/include/**/*", "msl/check/include/*"]},
    # Named for the wheel's tag; Build makes it by itself.
    ext_modules=[Extension("metalcore._C", ["csrc/python/module.cpp"], py_limited_api=True)],
    cmdclass={"build_ext": Build, "bdist_wheel": Wheel},
)
