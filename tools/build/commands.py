"""setup.py's commands, which build the package and make the wheel."""

import os
import shutil
from pathlib import Path

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

from .c_library import c_files
from .families import kernel_index
from .front_end import compiler
from .linux_kernels import cuda_programs, simulated_device, simulator_libraries
from .metal_kernels import metal_kernels
from .objects import COMPILE_COMMANDS, add_objects, precompile_headers, write_compile_commands
from .places import CSRC, KERNELS, LINUX, MACOS, MACOS_VERSION, PACKAGE, ROOT, WORK
from .tasks import Tasks, run


class Build(build_ext):
    """The extensions and lib/ with the kernels; in place also the simulated device."""

    def run(self):
        command = compiler()
        tasks, before_the_long_work = Tasks(), Tasks()
        outputs = [*simulator_libraries(tasks)] if LINUX else []
        outputs += [*kernel_index(before_the_long_work), *c_files(before_the_long_work)]
        headers = [precompile_headers(before_the_long_work, extension, command) for extension in self.extensions]
        before_the_long_work.run()
        write_compile_commands(self.extensions[0], command)
        objects = add_objects(tasks, self.extensions, command, headers)
        if LINUX:
            outputs += cuda_programs(tasks)
            if self.inplace and not self.editable_mode:  # pip's editable build may be an isolated one
                outputs += simulated_device(tasks)
        if MACOS:
            outputs += metal_kernels(tasks)
        tasks.run()
        outputs += [_link(tasks, *each, command) for each in zip(self.extensions, objects)]
        tasks.run()
        # The files go in place (editable), or into the tree that becomes the wheel.
        package = PACKAGE if self.inplace else Path(self.build_lib) / "metalcore"
        outputs = {
            output: package / output.relative_to(tasks.out) for output in outputs if output not in tasks.left_out
        }
        for output, target in outputs.items():
            copy(output, target)
        # Libraries of another build would be older than the rest, and metalcore runs the best set at hand. It would
        # also find programs of kernels that are gone.
        remove_others(package / "lib", kept=set(outputs.values()))
        if self.inplace:
            copy(WORK / COMPILE_COMMANDS, ROOT / COMPILE_COMMANDS)
        else:
            copy_tree(KERNELS, package / "kernels")
            if LINUX:
                for path in (*(CSRC / "simulated_device").iterdir(), CSRC / "backends" / "simulator" / "fault.h"):
                    copy(path, package / "simulator" / "csrc" / path.name)

    def get_outputs(self):
        return []


def _link(tasks, extension, objects, command):
    """Has an extension linked; returns its path."""
    libraries = [*(f"-L{path}" for path in extension.library_dirs), *(f"-l{name}" for name in extension.libraries)]
    output = tasks.out / extension.output
    link = [*command, *extension.extra_link_args, *map(str, objects), "-o", str(output), *libraries]
    return tasks.add(extension.output, objects, link, lambda output: run(link))


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


def copy(source, target):
    """Replaces an older target as a whole: a process that has the old file open keeps it."""
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


def remove_others(folder, kept):
    """Removes the files of a folder that are not among those kept, and empty folders."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
        elif path.is_file() and path not in kept:
            path.unlink()
