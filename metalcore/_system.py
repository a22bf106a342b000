"""What metalcore needs of a system: PyTorch 2.10, and on a Mac macOS 14 and a PyTorch that has a device there. One line
says what is missing. Importing this module looks for it, before the extension, which such a system may be unable to
load."""

from __future__ import annotations

import platform
import re
import sys
import warnings

import torch

__version__ = "0.1.0"

OLDEST_TORCH, OLDEST_MACOS = (2, 10), (14, 0)
_NEEDS_MACOS_15 = (2, 15)


def _require():
    """Raises ImportError where metalcore cannot run, and warns where PyTorch is too new for this macOS's GPU. A command
    (`python -m metalcore …`) ends with the line alone."""
    if line := _missing():
        if sys.argv[:1] == ["-m"] and "metalcore" in sys.orig_argv:
            sys.exit(f"metalcore: {line}")
        raise ImportError(f"metalcore: {line}")
    if line := _too_new_for_macos():
        warnings.warn(f"metalcore: {line}", RuntimeWarning, stacklevel=2)


def no_mps() -> str | None:
    """Returns why PyTorch has no MPS device on this Mac; None where it has one, and elsewhere."""
    if platform.system() != "Darwin" or torch.backends.mps.is_available():
        return None
    if not torch.backends.mps.is_built():
        return f"PyTorch {torch.__version__} is built without MPS"
    return _too_new_for_macos() or f"PyTorch {torch.__version__} finds no GPU on this Mac"


def _missing():
    if _version(torch.__version__) < OLDEST_TORCH:
        needed = _text(OLDEST_TORCH)
        return f"PyTorch {needed} or newer is needed, and this is {torch.__version__}: pip install -U torch"
    if platform.system() == "Darwin" and _macos() < OLDEST_MACOS:
        return f"macOS {OLDEST_MACOS[0]} or newer is needed, and this is macOS {platform.mac_ver()[0]}"
    return None


def oldest_macos(torch_version: tuple[int, int]) -> tuple[int, int]:
    """Returns the first macOS on which a PyTorch has an MPS device. Its wheels install on older ones too."""
    return (15, 0) if torch_version >= _NEEDS_MACOS_15 else OLDEST_MACOS


def _too_new_for_macos():
    if platform.system() != "Darwin" or _macos() >= (needed := oldest_macos(_version(torch.__version__))):
        return None
    return (
        f"PyTorch {torch.__version__} has no MPS device on macOS {platform.mac_ver()[0]}, since "
        f"PyTorch {_text(_NEEDS_MACOS_15)} and newer need macOS {needed[0]} for it; an older PyTorch has one "
        f"(pip install 'torch<{_text(_NEEDS_MACOS_15)}')"
    )


def _macos():
    return _version(platform.mac_ver()[0])


def _version(text):
    """Returns the first two numbers; (99, 0) for a text without numbers, which is taken for a new version."""
    numbers = re.match(r"(\d+)(?:\.(\d+))?", str(text))
    return (int(numbers[1]), int(numbers[2] or 0)) if numbers else (99, 0)


def _text(version):
    return ".".join(map(str, version))


_require()
