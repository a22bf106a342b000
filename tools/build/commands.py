"""setup.py's commands, which build the package and make the wheel."""

import contextlib
import hashlib
import os
import shlex
import shutil
import sysconfig
from pathlib import Path

from setuptools.command.bdist_wheel import bdist_wheel
from torch.utils import cpp_extension

from . import compile_commands
from .c_library import c_files
from .cuda_programs import cuda_programs
from .families import kernel_index
from .files import copy, copy_tree, remove_others
from .front_end import compiler
from .jobs import jobs
from .metal_kernels import metal_kernels
from .ops_extension import OBJECTS
from .places import CSRC, KERNELS, LINUX, MACOS, MACOS_VERSION, PACKAGE, ROOT, WORK
from .simulated_device import simulated_device
from .simulator_libraries import simulator_libraries
from .tasks import Tasks, run


class Build(cpp_extension.BuildExtension):
    """The ops' extension and lib/ with the kernels; in place also the simulated device."""

    def __init__(self, *args, **kwargs):
        # PATH lacks ninja where the environment is not activated.
        os.environ["PATH"] += os.pathsep + sysconfig.get_path("scripts")
        super().__init__(*args, **kwargs)

    def run(self):
        cpp_extension.verify_ninja_availability()
        self.tasks, before_the_long_work = Tasks(), Tasks()
        outputs = [*kernel_index(before_the_long_work), *c_files(before_the_long_work)]
        if LINUX:
            outputs += [*simulator_libraries(self.tasks), *cuda_programs(self.tasks)]
            if self.inplace and not self.editable_mode:  # pip's editable build may be an isolated one
                outputs += simulated_device(self.tasks)
        if MACOS:
            outputs += metal_kernels(self.tasks)
        before_the_long_work.run()
        self.libraries = []
        super().run()
        self.tasks.run()
        # The files go in place (editable), or into the tree that becomes the wheel.
        package = PACKAGE if self.inplace else Path(self.build_lib) / "metalcore"
        outputs = [output for output in [*outputs, *self.libraries] if output not in self.tasks.left_out]
        outputs = {output: package / output.relative_to(self.tasks.out) for output in outputs}
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

    def build_extensions(self):
        """Has PyTorch's class compile with the compiler that compile_shader would use, and our flags alone."""
        self.command = compiler()
        word = _one_word(self.command)
        self.compiler.set_executables(**{key: [word] for key in ("compiler_so", "compiler_so_cxx", "compiler_cxx")})
        self.compiler.set_include_dirs([])
        self.compiler.src_extensions = [*self.compiler.src_extensions, ".mm"]
        settings = {
            "CXX": word,
            "MAX_JOBS": str(jobs()),
            "TORCH_NO_COMPILER_WRAPPER": "1",
            # PyTorch need not like the compiler: nothing of the C++ library passes between it and the extension.
            "TORCH_DONT_CHECK_COMPILER_ABI": "1",
        }
        with _environment(settings):
            super().build_extensions()

    def build_extension(self, ext):
        folder = str(WORK / ext.objects)
        objects = self.compiler.compile(sorted(ext.sources), output_dir=folder, extra_postargs=ext.extra_compile_args)
        if ext.objects == OBJECTS:
            compile_commands.write(folder, self.compiler.compiler_cxx[0], self.command)
        libraries = [*(f"-L{path}" for path in ext.library_dirs), *(f"-l{name}" for name in ext.libraries)]
        output = self.tasks.out / ext.output
        output.parent.mkdir(parents=True, exist_ok=True)
        link = [*self.command, *ext.extra_link_args, *objects, "-o", str(output), *libraries]
        self.libraries.append(self.tasks.add(ext.output, map(Path, objects), link, lambda output: run(link)))

    def copy_extensions_to_source(self):
        """run() has done it."""

    def get_outputs(self):
        return []


@contextlib.contextmanager
def _environment(values):
    before = dict(os.environ)
    os.environ |= values
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before


def _one_word(command):
    """A compiler's command as one word, which is what PyTorch's class takes: a script, where it has several."""
    if len(command) == 1:
        return command[0]
    text = f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n'
    script = WORK / f"compiler-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(text)
    script.chmod(0o755)
    return str(script)


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
