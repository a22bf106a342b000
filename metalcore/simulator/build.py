"""Compiles the simulated device's extension for the installed PyTorch.

The extension uses PyTorch's internals, so a binary fits one PyTorch version and one Python version. setup.py builds the
one for the PyTorch it finds; with any other PyTorch, the first import builds one from the sources in the package.
Needs no other part of metalcore, and runs as a script: `python build.py DIRECTORY` builds there and prints the path.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
FLAGS = ["-std=c++20", "-O1", "-g0", "-fPIC", "-fvisibility=hidden", "-w"]


def sources():
    """The extension's C++ files: beside this file in an installed package, in csrc/ in a checkout."""
    for folder in (HERE / "csrc", HERE.parents[1] / "csrc" / "simulated_device"):
        if files := sorted(path for path in folder.glob("*") if path.suffix in (".h", ".cpp")):
            return files
    raise RuntimeError(f"metalcore.simulator: the simulated device's C++ sources are missing beside {HERE}")


def library_name():
    """The file that fits this PyTorch, this Python and these sources."""
    import torch

    # Builds of one release for the CPU, for CUDA and so on share these internals.
    version = re.sub(r"\+(cpu|cu\d+|xpu|rocm[\d.]+)$", "", torch.__version__)
    content = hashlib.sha256(b"".join(path.read_bytes() for path in sources())).hexdigest()[:12]
    return f"_device-torch{version}-{content}{sysconfig.get_config_var('EXT_SUFFIX')}"


def find():
    """The prebuilt extension, or None where this PyTorch needs another one."""
    path = HERE / library_name()
    return path if path.exists() else None


def build(directory):
    """Compiles the extension into `directory` and returns its path. Several processes may do so at once."""
    import torch

    compiler = find_compiler()
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        raise RuntimeError(f"metalcore.simulator: {headers / 'Python.h'} is missing, and the simulated device for torch "
                           f"{torch.__version__} has to be compiled. Install Python's headers "
                           "(Debian, Ubuntu: apt install python3-dev).")
    root = Path(torch.__file__).parent
    output = Path(directory) / library_name()
    handle, temporary = tempfile.mkstemp(prefix=f".{output.name}.", dir=directory)
    os.close(handle)
    # One translation unit: PyTorch's headers take far longer to compile than what is written here.
    files = [path for path in sources() if path.suffix == ".cpp"]
    program = "".join(f'#include "{path.name}"\n' for path in files)
    command = [compiler, *FLAGS, "-shared", "-x", "c++", "-", "-o", temporary, f"-I{files[0].parent}",
               "-isystem", str(root / "include"), "-isystem", str(headers),
               f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"]
    try:
        result = subprocess.run(command, input=program, text=True, stderr=subprocess.PIPE)
        if result.returncode:
            raise RuntimeError(f"metalcore.simulator: {compiler} could not compile the simulated device for torch "
                               f"{torch.__version__}:\n{result.stderr[-4000:]}")
        os.chmod(temporary, 0o755)
        os.replace(temporary, output)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return output


def find_compiler():
    for name in filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++")):
        if path := shutil.which(name):
            return path
    raise RuntimeError("metalcore.simulator: the simulated device was not built for this PyTorch, and there is no C++ "
                       "compiler to build it with. Install one (Debian, Ubuntu: apt install g++), name it in CXX, or "
                       "install the PyTorch that metalcore was built with.")


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    print(build(sys.argv[1]))
