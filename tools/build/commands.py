"""setup.py's commands, which build the package and make the wheel."""

import shutil
from pathlib import Path

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

from . import compile_commands
from .c_library import c_files
from .cuda_programs import cuda_programs
from .families import kernel_index
from .files import copy, copy_tree, remove_others
from .front_end import compiler
from .metal_kernels import metal_kernels
from .objects import add_objects, precompile_headers
from .places import CSRC, KERNELS, LINUX, MACOS, MACOS_VERSION, PACKAGE, ROOT, WORK
from .simulated_device import simulated_device
from .simulator_libraries import simulator_libraries
from .tasks import Tasks, run


class Build(build_ext):
    """The extensions and lib/ with the kernels; in place also the simulated device."""

    def run(self):
        command = compiler()
        tasks, before_the_long_work = Tasks(), Tasks()
        outputs = [*kernel_index(before_the_long_work), *c_files(before_the_long_work)]
        headers = [precompile_headers(before_the_long_work, extension, command) for extension in self.extensions]
        before_the_long_work.run()
        compile_commands.write(self.extensions[0], command)
        objects = [
            add_objects(tasks, extension, command, header) for extension, header in zip(self.extensions, headers)
        ]
        if LINUX:
            outputs += [*simulator_libraries(tasks), *cuda_programs(tasks)]
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
            copy(WORK / compile_commands.NAME, ROOT / compile_commands.NAME)
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
