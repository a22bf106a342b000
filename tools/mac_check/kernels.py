"""Compares what metalcore/mac_kernels.py says of PyTorch on a Mac with the wheel of each release."""

import importlib.util
import re
import sys

from ..build.places import ROOT
from . import CheckFailed

TABLE = "torchgen/packaged/ATen/native/native_functions.yaml"  # from which PyTorch is generated
_OPERATOR = "aten::"


def facts(path="mac_kernels.py"):
    """A module of metalcore, without the rest, which may not be built here."""
    spec = importlib.util.spec_from_file_location("facts", ROOT / "metalcore" / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def check(torch, kernels=None):
    """Checks {version: folder}. Raises CheckFailed with each fact that a wheel contradicts."""
    module, system = facts(), facts("_system.py")
    kernels = module.KERNELS if kernels is None else kernels
    wrong = []
    for version, folder in torch.items():
        release = tuple(int(part) for part in version.split(".")[:2])
        library = (folder / "lib" / "libtorch_cpu.dylib").read_bytes()
        operators = _operators((folder.parent / TABLE).read_text())
        for name, kernel in kernels.items():
            found = any(_has(part, library, operators) for part in kernel.evidence.split("|"))
            if found != (release >= kernel.since):
                has = "has" if found else "has not"
                first = ".".join(map(str, kernel.since))
                wrong.append(f"torch {version} {has} {kernel.evidence}: {name} is said to have a kernel since {first}")
        needed = system.oldest_macos(release)[0]
        if not re.search(rb"The MPS backend is supported on [Mm]acOS %d\.0\+" % needed, library):
            wrong.append(f"torch {version} does not say that it needs macOS {needed}")
    if wrong:
        raise CheckFailed("\n".join(wrong))
    return f"{len(kernels)} kernels in {len(torch)} releases"


def _has(evidence, library, operators):
    if evidence.startswith(_OPERATOR):
        return evidence.removeprefix(_OPERATOR) in operators
    return evidence.encode() in library


def _operators(table):
    """Those with a kernel for MPS."""
    found = set()
    for entry in re.split(r"^- func: ", table, flags=re.MULTILINE)[1:]:
        dispatch = entry.partition("  dispatch:")[2]
        if re.search(r"^ +(?:\w+, )*MPS(?:, \w+)*:", dispatch, re.MULTILINE):
            found.add(entry.split("(", 1)[0])
    return found
