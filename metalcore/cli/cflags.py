"""python -m metalcore cflags: what compilers, CMake and pkg-config need for programs that use metalcore.h."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
LIBRARY = _PACKAGE / "lib" / f"libmetalcore.{'dylib' if sys.platform == 'darwin' else 'so'}"


def add_parser(commands):
    parser = commands.add_parser(
        "cflags",
        help="compiler flags for C programs that use metalcore",
        description="Prints the flags with which a C compiler finds metalcore.h.",
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--libs", action="store_true", help="the linker's flags instead")
    choice.add_argument("--cmake-dir", action="store_true", help="the folder for CMake's metalcore_DIR instead")
    choice.add_argument("--pkgconfig-dir", action="store_true", help="the folder for PKG_CONFIG_PATH instead")
    parser.set_defaults(run=run)


def run(arguments):
    if not LIBRARY.exists():
        raise RuntimeError(f"this build has no library for C: there is no {LIBRARY}")
    folder = LIBRARY.parent
    if arguments.libs:
        print(shlex.join([f"-L{folder}", "-lmetalcore", f"-Wl,-rpath,{folder}"]))
    elif arguments.cmake_dir:
        print(folder / "cmake" / "metalcore")
    elif arguments.pkgconfig_dir:
        print(folder / "pkgconfig")
    else:
        print(shlex.join([f"-I{_PACKAGE / 'include'}"]))
