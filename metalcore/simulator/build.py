"""Compiles the simulated device's extension for the installed PyTorch.

The extension uses PyTorch's internals, so a binary fits one PyTorch version and one Python version. setup.py builds the
one for the PyTorch it finds; with any other PyTorch, the first import builds one from the sources in the package.
Needs no other part of metalcore than `msl`, so that setup.py can use both before there is more.
"""

import hashlib
import re
import subprocess
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
INCLUDE = HERE.parent / "msl" / "include"
FLAGS = ["-std=c++20", "-O1", "-g0", "-fPIC", "-fvisibility=hidden", "-w"]


def sources():
    """The extension's C++ files: beside this file in an installed package, in csrc/ in a checkout."""
    package, checkout = HERE / "csrc", HERE.parents[1] / "csrc"
    if package.is_dir():
        files = list(package.iterdir())
    else:
        files = [*(checkout / "simulated_device").iterdir(), checkout / "backends" / "simulator" / "fault.h"]
    files = [*(path for path in files if path.suffix in (".h", ".cpp")), INCLUDE / "host" / "kernel_abi.h"]
    return sorted(files, key=lambda path: path.name)  # the same order in both layouts


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


def build(output):
    """Compiles the extension as the file `output`."""
    import torch

    compiler = find_compiler().command
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        raise RuntimeError(f"metalcore.simulator: {headers / 'Python.h'} is missing, and the simulated device for "
                           f"torch {torch.__version__} has to be compiled. Install Python's headers "
                           "(Debian, Ubuntu: apt install python3-dev).")
    root = Path(torch.__file__).parent
    # One translation unit: PyTorch's headers take far longer to compile than what is written here.
    files = sources()
    program = "".join(f'#include "{path.name}"\n' for path in files if path.suffix == ".cpp")
    folders = sorted({path.parent for path in files} | {INCLUDE})
    command = [*compiler, *FLAGS, "-shared", "-x", "c++", "-", "-o", str(output), *(f"-I{path}" for path in folders),
               "-isystem", str(root / "include"), "-isystem", str(headers),
               f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"]
    result = subprocess.run(command, input=program, text=True, stderr=subprocess.PIPE)
    if result.returncode:
        raise RuntimeError(f"metalcore.simulator: {' '.join(compiler)} could not compile the simulated device for "
                           f"torch {torch.__version__}:\n{result.stderr[-4000:]}")


def find_compiler():
    if __package__:
        from ..msl import errors, host
    else:  # in setup.py
        from msl import errors, host
    try:
        return host.find_compiler()
    except errors.CompilerNotFoundError as error:
        raise RuntimeError("metalcore.simulator: the simulated device was not built for this PyTorch, and cannot be "
                           f"built now: {error}. Or install the PyTorch that metalcore was built with.") from None
