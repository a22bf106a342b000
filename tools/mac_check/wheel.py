"""Checks the wheel: what is in it, its metadata, and on which Macs pip takes it."""

import base64
import email
import hashlib
import re
import zipfile

from packaging import tags
from packaging.utils import parse_wheel_filename

from .build import ROOT
from .report import CheckFailed

TAG = "cp310-abi3-macosx_14_0_arm64"
_PYTHONS = ((3, 10), (3, 11), (3, 12), (3, 13), (3, 14))
# Whether pip on such a machine should take the wheel.
_MACHINES = {
    ((14, 0), "arm64"): True,
    ((15, 0), "arm64"): True,
    ((26, 0), "arm64"): True,
    ((13, 0), "arm64"): False,
    ((15, 0), "x86_64"): False,
}
_BINARIES = (".so", ".dylib", ".metallib", ".a")


def check(path):
    """Raises CheckFailed naming everything that is wrong with the wheel; returns what was looked at."""
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    problems = [*_metadata_problems(files), *_content_problems(files), *_resolution_problems(path)]
    if problems:
        raise CheckFailed(f"{path.name}:\n" + "\n".join(problems))
    return f"{len(files)} files, {path.stat().st_size >> 10} KiB; {len(_MACHINES)} machines, {len(_PYTHONS)} Pythons"


def _metadata_problems(files):
    (folder,) = {name.split("/")[0] for name in files if name.split("/")[0].endswith(".dist-info")}
    wheel = email.message_from_bytes(files[f"{folder}/WHEEL"])
    if wheel.get_all("Tag") != [TAG]:
        yield f"WHEEL has the tags {wheel.get_all('Tag')}, not {TAG}"
    if wheel["Root-Is-Purelib"] != "false":
        yield "WHEEL says that it is pure Python"
    metadata = email.message_from_bytes(files[f"{folder}/METADATA"])
    if metadata["Requires-Python"] != ">=3.10":
        yield f"METADATA requires Python {metadata['Requires-Python']}, not >=3.10"
    if "torch>=2.10" not in metadata.get_all("Requires-Dist", []):
        yield f"METADATA requires {metadata.get_all('Requires-Dist')}, and should torch>=2.10"
    recorded = {}
    for line in files[f"{folder}/RECORD"].decode().splitlines():
        name, digest, _ = line.rsplit(",", 2)
        recorded[name] = digest
    for name, content in files.items():
        digest = "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        if recorded.get(name) != digest and not name.endswith("/RECORD"):
            yield f"RECORD does not match {name}"


def _content_problems(files):
    for name in ("metalcore/__init__.py", "metalcore/_C.abi3.so", "metalcore/lib/metal/index"):
        if name not in files:
            yield f"{name} is missing"
    for name, content in files.items():
        if name.endswith(_BINARIES) and name != "metalcore/_C.abi3.so" and not name.startswith("metalcore/lib/metal/"):
            yield f"{name} is no part of a wheel for macOS"
        if content.startswith(b"\x7fELF"):
            yield f"{name} is a Linux binary"
    families = dict(line.split(" ", 1) for line in files.get("metalcore/lib/metal/index", b"").decode().splitlines())
    for source in sorted((ROOT / "kernels").rglob("*.metal")):
        name = f"metalcore/lib/metal/{source.name}"
        if name not in files:
            yield f"{name} is missing"
            continue
        if re.search(rb'^\s*#\s*include\s*"', files[name], re.MULTILINE):
            yield f"{name} includes a file, which Metal cannot find"
        if not families.get(source.stem, "").strip():
            yield f"metalcore/lib/metal/index knows no kernel of {source.name}"


def _resolution_problems(path):
    """Compares the tags of the wheel's name with those that pip computes for a machine."""
    _, _, _, offered = parse_wheel_filename(path.name)
    for (version, architecture), wanted in _MACHINES.items():
        for python in _PYTHONS:
            accepted = tags.cpython_tags(python, platforms=tags.mac_platforms(version, architecture))
            takes = not offered.isdisjoint(accepted)
            if takes != wanted:
                yield (f"pip {'takes' if takes else 'does not take'} it on macOS {version[0]}, {architecture}, "
                       f"with Python {python[0]}.{python[1]}")
