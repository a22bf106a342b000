"""Checks a wheel: what is in it, its metadata, and on which machines pip takes it.

    python -m tools.wheel_check dist/*.whl

METALCORE_ISA says, as for setup.py, for which instruction sets the wheel has kernels; here it is all by default.
"""

import base64
import email
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_KERNELS = ROOT / "kernels"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
_MAGIC = {b"\x7fELF": "Linux", b"\xcf\xfa\xed\xfe": "macOS", b"\xca\xfe\xba\xbe": "macOS"}
_BINARIES = (".so", ".dylib", ".metallib", ".a")


@dataclass
class Platform:
    """What the wheels of a platform have in common.

    Attributes:
        tag: the wheel's tag, a regular expression.
        binaries: the names of its binaries, a regular expression.
        for_c: what C programs need, apart from headers.
        of_family: what the wheel has for each file of kernels/, named by its path there.
        instruction_sets: the wheel has every kernel for each of them.
        folders: {folder of the checkout: where its files are in the package}.
        machines: {machine as pip's --platform calls it: whether pip takes the wheel there}.
    """

    name: str
    tag: str
    binaries: str
    for_c: tuple
    of_family: tuple
    instruction_sets: tuple
    folders: dict
    machines: dict


_FOR_C = ("pkgconfig/metalcore.pc", "cmake/metalcore/metalcore-config.cmake")
MACOS = Platform(
    "macOS",
    r"cp310-abi3-macosx_14_0_arm64",
    r"_C\.abi3\.so|lib/libmetalcore\.dylib|lib/metal/[\w/]+\.metallib",
    ("libmetalcore.dylib", *_FOR_C),
    ("lib/metal/{}.metal",),
    (),
    {"kernels": "kernels"},
    {
        "macosx_14_0_arm64": True,
        "macosx_15_0_arm64": True,
        "macosx_26_0_arm64": True,
        "macosx_13_0_arm64": False,
        "macosx_15_0_x86_64": False,
        "manylinux_2_28_aarch64": False,
    },
)
_LINUX = {
    machine: Platform(
        "Linux",
        rf"cp310-abi3-manylinux_2_\d+_{machine}",
        r"_C\.abi3\.so|lib/libmetalcore\.so|lib/[\w-]+/[\w/]+\.so",
        ("libmetalcore.so", *_FOR_C),
        ("lib/cuda/{}.cu", "lib/cuda/{}.json"),
        sets,
        {
            "kernels": "kernels",
            "csrc/simulated_device": "simulator/csrc",
            "csrc/backends/simulator/fault.h": "simulator/csrc/fault.h",
        },
        {f"manylinux_2_28_{other}": False, "macosx_15_0_arm64": False, "macosx_15_0_x86_64": False, "win_amd64": False},
    )
    for machine, other, sets in (
        ("x86_64", "aarch64", ("x86-64", "x86-64-v3", "x86-64-v4")),
        ("aarch64", "x86_64", ("aarch64",)),
    )
}

# One process asks pip itself, many times, whether it finds the wheel in a folder.
_PIP = """
import contextlib, json, os, sys
from pip._internal.cli.main import main
folder, output, machines, pythons = json.loads(sys.argv[1])
found = []
for machine in machines:
    for python in pythons:
        with open(os.devnull, "w") as silent, contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
            failed = main(["download", "-qqq", "--disable-pip-version-check", "--no-cache-dir", "--no-deps",
                           "--no-index", "--find-links", folder, "-d", output, "--only-binary=:all:",
                           "--implementation", "cp", "--platform", machine, "--python-version", python, "metalcore"])
        found.append([machine, python, not failed])
print(json.dumps(found))
"""


def problems(path, sets="all"):
    """Returns all that is wrong with the only wheel in its folder, in words.

    Args:
        sets: the instruction sets, as METALCORE_ISA names them; "all" are those of the wheel's machine.
    """
    return [
        *_metadata_problems(_files(path), _platform(path)),
        *content_problems(path, sets),
        *_resolution_problems(path, _platform(path)),
    ]


def content_problems(path, sets="all"):
    """Returns what is wrong with what a wheel contains."""
    files, platform = _files(path), _platform(path)
    chosen = platform.instruction_sets if sets == "all" else [name for name in sets.split(",") if name]
    return [
        *_source_problems(files, platform),
        *_binary_problems(files, platform, chosen),
        *_index_problems(files),
        *_metal_problems(files),
    ]


def _files(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


def _platform(path):
    machine = next((machine for machine in _LINUX if path.stem.endswith(machine)), None)
    return _LINUX[machine] if "linux" in path.name and machine else MACOS


def summary(path):
    with zipfile.ZipFile(path) as archive:
        count = sum(not name.endswith("/") for name in archive.namelist())
    return f"{count} files, {path.stat().st_size >> 10} KiB"


def _metadata_problems(files, platform):
    (folder,) = {name.split("/")[0] for name in files if name.split("/")[0].endswith(".dist-info")}
    wheel = email.message_from_bytes(files[f"{folder}/WHEEL"])
    tags = wheel.get_all("Tag")
    if not all(re.fullmatch(platform.tag, tag) for tag in tags):
        yield f"WHEEL has the tags {tags}, not {platform.tag}"
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


def _source_problems(files, platform):
    """Modules, headers and sources must be the checkout's. An earlier build may have left other ones."""
    sources = {
        path.relative_to(ROOT).as_posix(): path
        for suffix in ("py", "h")
        for path in (ROOT / "metalcore").rglob(f"*.{suffix}")
    }
    sources["metalcore_autoload.py"] = ROOT / "metalcore_autoload.py"
    for folder, place in platform.folders.items():
        for path in [ROOT / folder, *(ROOT / folder).rglob("*")]:
            if path.is_file():
                sources[f"metalcore/{place}/{path.relative_to(ROOT / folder).as_posix()}".removesuffix("/.")] = path
    for name in sorted(sources.keys() - files.keys()):
        yield f"{name} is missing"
    for name in sorted(name for name in files if name in sources or name.endswith((".py", ".h", ".cpp"))):
        if name not in sources:
            yield f"{name} is not in the checkout"
        elif files[name] != sources[name].read_bytes():
            yield f"{name} is not the checkout's"


def _binary_problems(files, platform, sets):
    folders = (*sets, "checking") if sets else ()
    families, flushing = _families(), _flushing_families()
    for family in families:
        suffixes = ("", "-flushing") if family in flushing else ("",)
        libraries = [f"lib/{folder}{suffix}/{{}}.so" for folder in folders for suffix in suffixes]
        for name in (f"metalcore/{pattern.format(family)}" for pattern in (*libraries, *platform.of_family)):
            if name not in files:
                yield f"{name} is missing"
    for name in ("metalcore/_C.abi3.so", *(f"metalcore/lib/{name}" for name in platform.for_c)):
        if name not in files:
            yield f"{name} is missing"
    for name, content in files.items():
        if name.endswith(_BINARIES) and not re.fullmatch(f"metalcore/(?:{platform.binaries})", name):
            yield f"{name} is no part of a wheel for {platform.name}"
        if (kind := _MAGIC.get(content[:4], platform.name)) != platform.name:
            yield f"{name} is a binary for {kind}"


def _families():
    """Returns the files of kernels/, by their paths there."""
    return sorted(_name(path) for path in _KERNELS.rglob("*.metal"))


def _flushing_families():
    """Returns the families that have another variant for GPUs without float16's subnormal numbers
    (tools/build/families.py)."""
    headers = {path: path.read_text() for path in _KERNELS.rglob("*.h")}
    sources = {path: path.read_text() for path in _KERNELS.rglob("*.metal")}
    flushing, more = {}, {path for path, text in headers.items() if "METALCORE_HALF_SUBNORMALS" in text}
    while more:  # what includes one of them, too
        flushing |= dict.fromkeys(more)
        more = _including(headers, more) - flushing.keys()
    return {_name(path) for path in _including(sources, flushing)}


def _including(files, headers):
    """Those of `files`, {path: text}, that include one of the headers themselves. Headers of two folders may share a
    name, of which the folder of the file comes first."""
    including = set()
    for path, text in files.items():
        for name in re.findall(r'#include "([^"]+)"', text):
            places = [Path(os.path.normpath(folder / name)) for folder in (path.parent, _KERNELS)]
            if next(filter(Path.exists, places), None) in headers:
                including.add(path)
    return including


def _name(path):
    return path.relative_to(_KERNELS).with_suffix("").as_posix()


def _index_problems(files):
    index = files.get("metalcore/lib/index", b"").decode()
    known = [line.split()[0] for line in index.splitlines() if len(line.split()) > 1]
    if sorted(known) != _families():
        yield "metalcore/lib/index has not the families of kernels/, each with its kernels"


def _metal_problems(files):
    for name in sorted(name for name in files if re.fullmatch(r"metalcore/lib/metal/[\w/]+\.metal", name)):
        if re.search(rb'^\s*#\s*include\s*"', files[name], re.MULTILINE):
            yield f"{name} includes a file, which Metal cannot find"


def _resolution_problems(path, platform):
    expected = {path.stem.split("-")[-1].split(".")[0]: True} | platform.machines
    for machine, python, takes in _resolved(path, expected):
        if takes != expected[machine]:
            yield f"pip {'takes' if takes else 'does not take'} it on {machine} with Python {python}"


def _resolved(path, machines):
    with tempfile.TemporaryDirectory() as output:
        asked = json.dumps([str(path.parent), output, list(machines), PYTHONS])
        done = subprocess.run([sys.executable, "-c", _PIP, asked], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"pip cannot be asked about {path.name}:\n{done.stderr}")
    return json.loads(done.stdout)


if __name__ == "__main__":
    wrong = 0
    for argument in map(Path, sys.argv[1:]):
        faults = problems(argument, os.environ.get("METALCORE_ISA", "all"))
        wrong += len(faults)
        for text in faults or [f"{summary(argument)}, right"]:
            print(f"{argument.name}: {text}")
    sys.exit(1 if wrong else 0)
