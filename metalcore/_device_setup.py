"""The setup.py with which _device_library.py has the simulated device built, in a folder of its own.

    python setup.py build_ext

Environment:
  DEVICE_INCLUDE  folders of its headers, separated as in PATH
  DEVICE_FLAGS    for the compiler
"""

import os

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

if __name__ == "__main__":
    setup(
        name="device",
        ext_modules=[
            CppExtension(
                "_device",
                ["device.cpp"],
                include_dirs=os.environ["DEVICE_INCLUDE"].split(os.pathsep),
                extra_compile_args=os.environ["DEVICE_FLAGS"].split(),
            )
        ],
        # One file: ninja would have nothing to do, and need not be there.
        cmdclass={"build_ext": BuildExtension.with_options(use_ninja=False)},
    )
