"""Where files lie, and which platform is built for."""

import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "metalcore"
CSRC = ROOT / "csrc"
KERNELS = ROOT / "kernels"

# Python's own platform, unless _PYTHON_HOST_PLATFORM says otherwise (tools/mac_check).
PLATFORM = sysconfig.get_platform()
MACOS = PLATFORM.startswith("macosx")
MACOS_VERSION = "14.0"  # the first with Metal 3.1
LINUX = PLATFORM.startswith("linux")

MACOS_C_LIBRARY = "libmetalcore.dylib"
C_LIBRARY = MACOS_C_LIBRARY if MACOS else "libmetalcore.so"

WORK = ROOT / "build" / ("metalcore-macos" if MACOS else "metalcore")
