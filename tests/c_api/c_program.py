"""Calls of libmetalcore's functions by the C program of calls.c."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tools.build.places import C_LIBRARY, WORK
from tools.build.tasks import Tasks

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGE = ROOT / "metalcore"
LIBRARY = PACKAGE / "lib"
OBJECTS = WORK / "out" / "c_objects"  # those of the library
STATUS = (
    "OK",
    "INVALID_ARGUMENT",
    "OUT_OF_MEMORY",
    "BUSY",
    "NO_DEVICE",
    "NO_KERNELS",
    "KERNEL_FAULT",
    "FAILED",
    "INVALID_FILE",
)

only_linux = pytest.mark.skipif(sys.platform != "linux", reason="libmetalcore is built for Linux")


def built_objects():
    """The objects that setup.py linked, by their paths. Others in the folder are of sources that are gone."""
    return [part for part in Tasks().signature(f"lib/{C_LIBRARY}") if part.startswith(f"{OBJECTS}/")]


def compiled(source, output, *flags, compiler=("cc", "-std=c99")):
    """The path of a program of one file, linked with libmetalcore."""
    command = [
        *compiler,
        *("-Wall", "-Wextra", "-Werror", "-O1", "-g", "-D_GNU_SOURCE", f"-I{PACKAGE / 'include'}"),
        *(str(source), "-o", str(output), *flags),
        *(f"-L{LIBRARY}", "-lmetalcore", "-ldl", "-pthread", f"-Wl,-rpath,{LIBRARY}"),
    ]
    subprocess.run(command, check=True)
    return output


def name_of(dtype):
    return {torch.float32: "float", torch.bfloat16: "bfloat16"}[dtype]


class Output:
    """Memory of a result, of this shape and dtype."""

    def __init__(self, *shape, dtype, offset=0, initial=None):
        self.shape, self.dtype, self.offset, self.initial = shape, dtype, offset, initial


class Offset:
    """An array that begins some bytes behind what malloc returned."""

    def __init__(self, tensor, offset):
        self.tensor, self.offset = tensor, offset


def printed(program, options, folder, lines, environment):
    """The lines that a C program prints for a file of lines. It must end well."""
    commands = folder / "commands"
    commands.write_text("\n".join(lines) + "\n")
    done = subprocess.run(
        [str(program), *options, str(commands)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout.splitlines()


class Calls:
    """Calls that one process makes.

    Args:
        folder: an empty folder for arrays.
    """

    def __init__(self, folder):
        self.folder, self.lines, self.outputs = folder, [], []

    def add(self, function, *arguments):
        """Has the program call metalcore_<function> with tensors, Offsets, Outputs, numbers and None."""
        outputs = []
        words = [self._word(argument, outputs) for argument in arguments]
        self.lines.append(" ".join([function, *words]))
        self.outputs.append(outputs)

    def run(self, program, *options, **environment):
        """[(the status, what the call allocated in its last repetition, the error, the results)], in order."""
        reports = [line.split("\t") for line in printed(program, options, self.folder, self.lines, environment)]
        assert len(reports) == len(self.lines)
        return [
            (f"METALCORE_{STATUS[int(status)]}", int(count), error, outputs)
            for (status, count, error), outputs in zip(reports, map(self.results, range(len(self.lines))))
        ]

    def results(self, call, suffix=""):
        return [self._read(path.with_name(path.name + suffix), output) for path, output in self.outputs[call]]

    def _word(self, argument, outputs):
        if argument is None:
            return "NULL"
        if isinstance(argument, Output):
            path = self._path()
            if argument.initial is not None:
                word = f"={path}:{self._write(argument.initial)}"
            else:
                size = torch.empty((), dtype=argument.dtype).element_size()
                word = f">{path}:{torch.Size(argument.shape).numel() * size}"
            outputs.append((path, argument))
            return word + (f"+{argument.offset}" if argument.offset else "")
        if isinstance(argument, Offset):
            return f"<{self._write(argument.tensor)}+{argument.offset}"
        if isinstance(argument, torch.Tensor):
            return f"<{self._write(argument)}"
        return repr(argument)

    def _path(self):
        self.arrays = getattr(self, "arrays", 0) + 1
        return self.folder / f"array{self.arrays}"

    def _write(self, tensor):
        path = self._path()
        path.write_bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
        return path

    def _read(self, path, output):
        if not path.exists():
            return None
        content = bytearray(path.read_bytes())
        if not content:
            return torch.empty(output.shape, dtype=output.dtype)
        return torch.frombuffer(content, dtype=output.dtype).reshape(output.shape)
