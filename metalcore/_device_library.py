"""The simulated device's extension, which uses PyTorch's internals: a binary fits one PyTorch and one Python version.

So wheels have its sources, and its first import with a PyTorch compiles it into the cache of compiled programs.
`setup.py build_ext --inplace` compiles it ahead, beside the package's files, for the PyTorch at hand. For that this
module needs no other part of metalcore than `msl`.
"""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
INCLUDE = PACKAGE / "msl" / "include"
SETUP = PACKAGE / "_device_setup.py"
FLAGS = ["-std=c++20", "-O1", "-g0", "-fPIC", "-fvisibility=hidden", "-w"]


def sources():
    """Returns the extension's C++ files: in simulator/csrc/ of an installed package, in csrc/ of a checkout."""
    installed, checkout = PACKAGE / "simulator" / "csrc", PACKAGE.parent / "csrc"
    if installed.is_dir():
        files = list(installed.iterdir())
    else:
        files = [*(checkout / "simulated_device").iterdir(), checkout / "backends" / "simulator" / "fault.h"]
    files = [*(path for path in files if path.suffix in (".h", ".cpp")), INCLUDE / "host" / "kernel_abi.h"]
    return sorted(files, key=lambda path: path.name)  # the same order in both layouts


def library_name():
    """Returns the file that fits this PyTorch, this Python and these sources."""
    import torch

    # Builds of one release for the CPU, for CUDA and so on share these internals.
    version = re.sub(r"\+(cpu|cu\d+|xpu|rocm[\d.]+)$", "", torch.__version__)
    content = hashlib.sha256(b"".join(path.read_bytes() for path in sources())).hexdigest()[:12]
    return f"_device-torch{version}-{content}{sysconfig.get_config_var('EXT_SUFFIX')}"


def find():
    """Returns the extension for this PyTorch: beside the package's files or in the cache; None where it is not compiled
    yet."""
    from .msl import cache

    built = PACKAGE / "simulator" / library_name()
    return built if built.exists() else cache.existing(built.name)


def find_or_build():
    """Returns the extension for this PyTorch, compiled into the cache if need be. Raises RuntimeError where that
    fails."""
    import torch

    from .msl import cache

    def make(path):
        print(
            f"metalcore.simulator: compiling the simulated device for torch {torch.__version__}, once (half a minute)",
            file=sys.stderr,
            flush=True,
        )
        build(path)

    built = PACKAGE / "simulator" / library_name()
    return built if built.exists() else cache.entry(built.name, make)


def build(output):
    """Compiles the extension as the file `output`, by PyTorch's own means for extensions (_device_setup.py)."""
    import torch

    compiler = shlex.join(find_compiler(torch.__version__).command)
    headers = python_headers()
    if headers is None:
        raise RuntimeError(
            f"metalcore.simulator: Python.h is missing in {sysconfig.get_path('include')}, and the "
            f"simulated device for torch {torch.__version__} has to be compiled, once. Install Python's "
            "headers (Debian, Ubuntu: apt install python3-dev)."
        )
    files = sources()
    environment = {
        **os.environ,
        # The same PyTorch, which is not to load the device that is being made.
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TORCH_NO_COMPILER_WRAPPER": "1",
        # In the places of the commands and flags that Python was built with.
        **dict.fromkeys(("CC", "CXX"), compiler),
        **dict.fromkeys(("LDSHARED", "LDCXXSHARED"), f"{compiler} -shared"),
        **dict.fromkeys(("CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS"), ""),
        "DEVICE_INCLUDE": os.pathsep.join(sorted({str(path.parent) for path in files} | {str(INCLUDE)})),
        "DEVICE_FLAGS": " ".join(FLAGS),
    }
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(SETUP, Path(folder) / "setup.py")
        # One translation unit: PyTorch's headers take far longer to compile than what is written here.
        program = "".join(f'#include "{path.name}"\n' for path in files if path.suffix == ".cpp")
        (Path(folder) / "device.cpp").write_text(program)
        command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", "built", "--build-temp", "work"]
        done = subprocess.run(
            command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        if done.returncode:
            raise RuntimeError(
                f"metalcore.simulator: {compiler} could not compile the simulated device for "
                f"torch {torch.__version__}:\n{done.stdout[-4000:]}"
            )
        (built,) = (Path(folder) / "built").iterdir()
        shutil.copyfile(built, output)


def python_headers():
    """Returns the directory with Python.h, or None."""
    headers = Path(sysconfig.get_path("include"))
    return headers if (headers / "Python.h").exists() else None


def find_compiler(torch_version):
    from .msl import errors
    from .msl.runtime import host

    try:
        return host.find_compiler()
    except errors.CompilerNotFoundError as error:
        raise RuntimeError(
            f"metalcore.simulator: the simulated device for torch {torch_version} has to be compiled, once: {error}"
        ) from None
