"""Where files lie, which platform is built for, and where nobody could use the result."""

import platform
import sys
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


def require_supported():
    """Raises SystemExit on Pythons and Macs that metalcore's wheels are not for."""
    release = platform.mac_ver()[0] if sys.platform == "darwin" else ""
    if reason := unsupported(bool(sysconfig.get_config_var("Py_GIL_DISABLED")), release, platform.machine()):
        raise SystemExit(f"metalcore cannot be built here: {reason}")


def unsupported(free_threaded, macos, machine):
    """Returns why there is nothing for a Python, or "".

    Args:
        free_threaded: whether it is a build without the GIL.
        macos: the Mac's version of macOS, or "" on another system.
        machine: the processor that this Python runs for. On Apple silicon that is x86_64 under Rosetta.
    """
    if free_threaded:
        version = platform.python_version()
        return (
            f"this Python {version} is free-threaded. One binary serves every Python through Python's limited API, "
            f"which free-threaded Pythons do not have. Use the usual build of Python {version}"
        )
    if macos and machine != "arm64":
        return f"this Python runs for {machine}. Metal kernels need Apple silicon, and a Python for arm64"
    if macos and _numbers(macos) < _numbers(MACOS_VERSION):
        return (
            f"this Mac has macOS {macos}. The kernels need Metal 3.1, which macOS {MACOS_VERSION} is the first to have"
        )
    return ""


def _numbers(version):
    return [int(part) for part in version.split(".")]
