"""Builds metalcore: the ops (_C.abi3.so), the library for C (lib/libmetalcore.so), the built-in kernels (lib/) and, in
place, the simulated device.

Only what changed is rebuilt. How: tools/build. Environment:
  METALCORE_JOBS  compilers to run at once (as many as there are cores, with 2 GB of memory for each)
  METALCORE_ISA   instruction sets of the simulator's kernels, comma separated; all of this architecture's; native for
                  this CPU's alone; empty for none, where only a GPU runs kernels; first-use (the default) to compile
                  each when the simulator first runs it, without the library for C
  METALCORE_TORCH PyTorch's package, where it is not the one of this Python: headers and libraries of another platform
"""

import os
import sys
from pathlib import Path

from setuptools import find_packages, setup

sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # PyTorch would load a metalcore that is installed
from tools.build.c_library import c_library
from tools.build.commands import Build, Wheel
from tools.build.ops_extension import ops_extension
from tools.build.places import require_supported

require_supported()

setup(
    packages=find_packages(include=["metalcore", "metalcore.*"]),
    py_modules=["metalcore_autoload"],
    package_data={
        "metalcore": [
            "py.typed",
            "include/*.h",
            "golden/reference.zip",
            "**/*.pyi",
            "msl/include/**/*",
            "msl/check/include/*",
            "estimates/include/**/*",
        ],
    },
    ext_modules=[ops_extension(), *c_library()],
    cmdclass={"build_ext": Build, "bdist_wheel": Wheel},
)
