"""Checks what metalcore takes for granted about PyTorch on a Mac, in the wheel of each release.

What csrc/backends/mps/stream.h says: functions are exported under the names that our declarations get, they return what
ours say, the queue is the current stream's, and dispatches run in order: PyTorch opens no concurrent encoder. What
metalcore/mac_kernels.py says: which operators have a kernel for MPS.
"""

import importlib.util
import re
import subprocess
import sys

from ..build.places import ROOT
from . import CheckFailed
from .macho import MachO

# A function's return type is not in its exported name, so it is compared with PyTorch's header.
_DECLARED = {
    "ATen/mps/MPSStream.h": [
        r"^\s*MTLComputeCommandEncoder_t commandEncoder\(\);",
        r"^typedef id<MTLComputeCommandEncoder> MTLComputeCommandEncoder_t;",
        r"^\s*MTLDevice_t device\(\) const;",
        r"^typedef id<MTLDevice> MTLDevice_t;",
        r"^TORCH_API MPSStream\* getCurrentMPSStream\(\);",
        r"^\s*void synchronize\(SyncType syncType\);",
        r"^enum class SyncType \{\s*NONE,[^,]*\n\s*COMMIT,",
    ],
    "torch/csrc/api/include/torch/mps.h": [
        r"^DispatchQueue_t TORCH_API get_dispatch_queue\(\);",
        r"^(using DispatchQueue_t = dispatch_queue_t;|typedef dispatch_queue_t DispatchQueue_t;)",
    ],
}
# PyTorch sends the first of these. The others are what it would need to run dispatches side by side, and then the
# backend's barriers (csrc/backends/mps/backend.mm) should be looked at again.
_SERIAL = "computeCommandEncoder"
_CONCURRENT = (
    "computeCommandEncoderWithDispatchType:",
    "computeCommandEncoderWithDescriptor:",
    "memoryBarrierWithScope:",
)
_QUEUE_OF = "__ZNK2at3mps8MPSHooks16getDispatchQueueEv"
_CURRENT = "__ZN2at3mps19getCurrentMPSStreamEv"
TABLE = "torchgen/packaged/ATen/native/native_functions.yaml"  # from which PyTorch is generated
_OPERATOR = "aten::"


def check_functions(torch, imports):
    """Checks {version: folder} against the symbols that the extension imports from PyTorch's Metal backend."""
    wanted = {name for name in imports if "2at3mps" in name or "5torch3mps" in name}
    for version, folder in torch.items():
        library = folder / "lib" / "libtorch_cpu.dylib"
        missing = wanted - MachO(library).exports()
        if missing:
            raise CheckFailed(f"torch {version} does not export {', '.join(sorted(missing))}")
        for header, patterns in _DECLARED.items():
            text = (folder / "include" / header).read_text()
            for pattern in patterns:
                if not re.search(pattern, text, re.MULTILINE):
                    raise CheckFailed(f"torch {version}: {header} has no declaration like {pattern}")
        # Public streams came in 2.15. In earlier releases the current stream is the default one, with the only queue.
        if (folder / "mps" / "streams.py").exists() and _CURRENT not in _calls(library, _QUEUE_OF):
            raise CheckFailed(f"torch {version} has streams, but get_dispatch_queue() is not the current one's queue")
        check_encoders(version, library)
    return f"{len(wanted)} functions in {len(torch)} releases"


def check_encoders(version, library):
    """Raises CheckFailed if a library of PyTorch's has the selectors for encoders whose dispatches run side by side."""
    image = MachO(library)
    if not image.has_selector(_SERIAL):
        raise CheckFailed(f"torch {version} does not send {_SERIAL}: how it opens encoders is not known")
    if found := [selector for selector in _CONCURRENT if image.has_selector(selector)]:
        raise CheckFailed(f"torch {version} may open concurrent encoders: it has {', '.join(found)}")


def _calls(library, function):
    """Returns the functions that a function calls, from its disassembly."""
    listing = subprocess.run(
        ["llvm-objdump-19", "-d", f"--disassemble-symbols={function}", str(library)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return set(re.findall(r"\bbl?\s.*<(\w+)>", listing))


def facts(path="mac_kernels.py"):
    """Returns a module of metalcore, without the rest, which may not be built here."""
    spec = importlib.util.spec_from_file_location("facts", ROOT / "metalcore" / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def check_kernels(torch, kernels=None):
    """Checks {version: folder}. Raises CheckFailed with each fact that a wheel contradicts."""
    module, system = facts(), facts("_system.py")
    kernels = module.KERNELS if kernels is None else kernels
    wrong = []
    for version, folder in torch.items():
        release = tuple(int(part) for part in version.split(".")[:2])
        library = (folder / "lib" / "libtorch_cpu.dylib").read_bytes()
        operators = _operators((folder.parent / TABLE).read_text())
        for name, kernel in kernels.items():
            has_evidence = any(_has(part, library, operators) for part in kernel.evidence.split("|"))
            if has_evidence != (release >= kernel.since):
                has = "has" if has_evidence else "has not"
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
    """Returns the operators with a kernel for MPS."""
    operators = set()
    for entry in re.split(r"^- func: ", table, flags=re.MULTILINE)[1:]:
        dispatch = entry.partition("  dispatch:")[2]
        if re.search(r"^ +(?:\w+, )*MPS(?:, \w+)*:", dispatch, re.MULTILINE):
            operators.add(entry.split("(", 1)[0])
    return operators
