"""Builds the libraries that stand for NVIDIA's."""

import subprocess
from pathlib import Path

from metalcore.msl.runtime import host

HERE = Path(__file__).resolve().parent


class Fakes:
    """Shared libraries in an empty folder, each built once."""

    def __init__(self, folder):
        self._folder, self._built = folder, {}

    def build(self, source, soname, *flags):
        """The path of a shared library with that soname."""
        key = (source, *flags)
        if key not in self._built:
            path = self._folder / str(len(self._built)) / soname
            path.parent.mkdir()
            command = [
                *host.find_compiler().command,
                *("-x", "c", "-std=gnu11", "-shared", "-fPIC", "-O1", "-pthread", f"-Wl,-soname,{soname}"),
                *(*flags, str(HERE / source), "-o", str(path)),
            ]
            subprocess.run(command, check=True)
            self._built[key] = path
        return str(self._built[key])
