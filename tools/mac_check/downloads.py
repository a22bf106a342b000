"""Downloads from PyPI, and keeps between runs, macOS's open-source headers, PyTorch's macOS wheels, and wheels in which
Apple's compilers and headers have left traces.

The files that are used lie in $METALCORE_MAC_CHECK_CACHE, by default ~/.cache/metalcore-mac-check.
"""

import fnmatch
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import CheckFailed

CACHE = Path(os.environ.get("METALCORE_MAC_CHECK_CACHE") or Path("~/.cache/metalcore-mac-check").expanduser())
FIRST_TORCH_MINOR = (2, 10)
# The platform is an arm64 Mac with macOS 14, and a Python that all these wheels support.
TARGET = [
    "--python-version",
    "3.11",
    "--implementation",
    "cp",
    "--abi",
    "cp311",
    "--abi",
    "abi3",
    "--abi",
    "none",
    *(
        f"--platform=macosx_{version}"
        for version in ("14_0_arm64", "13_0_arm64", "12_0_arm64", "11_0_arm64", "10_9_universal2")
    ),
]
# They are pinned since a newer one may be laid out differently. Zig brings Darwin's open-source headers and libc++'s.
PINNED = {
    "ziglang==0.14.1": [
        "ziglang/lib/libc/include/any-macos-any/*",
        "ziglang/lib/libc/darwin/*",
        "ziglang/lib/libcxx/include/*",
        "ziglang/lib/libcxxabi/include/*",
    ],
    "pyobjc-core==12.2.2": ["objc/_objc*.so"],
    "pyobjc-framework-Cocoa==12.2.2": ["Foundation/*.so", "Foundation/_metadata.py"],
    "pyobjc-framework-Metal==12.2.2": ["Metal/*.so", "Metal/_metadata.py"],
    "mlx-metal==0.32.4": ["mlx/include/metal_cpp/*", "mlx/lib/libmlx.dylib"],
    "abi3info==2026.9.25": ["abi3info/*"],
}
_HEADERS = ["torch/include/*", "torch/version.py"]
_LIBRARIES = ["torch/lib/libc10.dylib", "torch/lib/libtorch.dylib", "torch/lib/libtorch_cpu.dylib"]
# These files say how streams work in a release.
_OPERATORS = ["torchgen/packaged/ATen/native/native_functions.yaml"]  # what each release has for its operators
_STREAMS = ["torch/mps/*.py", "torch/include/ATen/mps/MPSStream.h", "torch/include/torch/csrc/api/include/torch/mps.h"]


class Downloads:
    """Folders of unpacked wheels.

    Args:
        quick: download macOS's headers alone, which compiling needs.

    Attributes:
        folders: every folder.
        pinned: {project name: folder}.
        torch: {"2.10.0": folder of the package `torch`, …}: the newest release of each minor, oldest first.
        torch_to_build_with: the folders of the releases with headers: the oldest, and the one installed here.
    """

    def __init__(self, *, quick=False):
        CACHE.mkdir(parents=True, exist_ok=True)
        versions = [] if quick else _torch_versions()
        with_headers = {*versions[:1], importlib.metadata.version("torch").split("+")[0]}
        wanted = {name: members for name, members in PINNED.items() if not quick or name.startswith("ziglang")}
        for version in versions:
            headers = _HEADERS if version in with_headers else []
            wanted[f"torch=={version}"] = [*_LIBRARIES, *_STREAMS, *_OPERATORS, *headers]
        with ThreadPoolExecutor(3) as pool:
            folders = dict(zip(wanted, pool.map(_unpacked, wanted, wanted.values())))
        for folder in CACHE.iterdir():  # a release that has been replaced leaves its folder
            if not quick and folder.is_dir() and folder not in folders.values():
                shutil.rmtree(folder)
        self.folders = list(folders.values())
        self.pinned = {name.split("==")[0]: folder for name, folder in folders.items() if name in PINNED}
        self.torch = {version: folders[f"torch=={version}"] / "torch" for version in versions}
        self.torch_to_build_with = [self.torch[version] for version in versions if version in with_headers]

    def evidence(self):
        """Libraries that were built on a Mac, which prove that macOS has what they import."""
        folders = [*self.pinned.values(), *self.torch.values()]
        return [path for folder in folders for pattern in ("*.so", "*.dylib") for path in sorted(folder.rglob(pattern))]


def _torch_versions():
    """Returns the newest release of every minor version that PyPI has, or that the cache has where PyPI cannot be
    reached."""
    known = CACHE / "torch-versions.json"
    command = [sys.executable, "-m", "pip", "index", "versions", "torch", *TARGET, "--only-binary=:all:"]
    done = subprocess.run(command, capture_output=True, text=True)
    listed = re.search(r"Available versions: (.*)", done.stdout)
    if not listed:
        if known.exists():
            return json.loads(known.read_text())
        raise CheckFailed(f"PyPI: cannot list the versions of torch:\n{done.stderr}")
    newest = {}
    for text in listed[1].split(", "):
        release = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", text)
        if release and (minor := (int(release[1]), int(release[2]))) >= FIRST_TORCH_MINOR:
            newest[minor] = max(newest.get(minor, 0), int(release[3]))
    versions = [f"{major}.{minor}.{patch}" for (major, minor), patch in sorted(newest.items())]
    known.write_text(json.dumps(versions))
    return versions


def _unpacked(requirement, members):
    """Returns the folder with these members of a requirement's macOS wheel."""
    folder = CACHE / re.sub(r"\W+", "-", f"{requirement} {zlib.crc32(' '.join(members).encode()):x}")
    if folder.exists():
        return folder
    with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--only-binary=:all:",
            *TARGET,
            "-d",
            temporary,
            requirement,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise CheckFailed(f"PyPI: cannot download {requirement} for macOS:\n{done.stderr}")
        (wheel,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [
                name
                for name in archive.namelist()
                if ".dSYM/" not in name and any(fnmatch.fnmatch(name, member) for member in members)
            ]
            archive.extractall(Path(temporary) / "content", names)
        os.replace(Path(temporary) / "content", folder)
    return folder
