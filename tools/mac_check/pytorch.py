"""Checks what csrc/backends/mps/stream.h takes for granted about PyTorch, in each release: functions are exported under
the names that our declarations get, they return what ours say, the queue is the current stream's, and dispatches run in
order: PyTorch opens no concurrent encoder."""

import re
import subprocess

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


def check(torch, imports):
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
    """The functions that a function calls, from its disassembly."""
    listing = subprocess.run(
        ["llvm-objdump-19", "-d", f"--disassemble-symbols={function}", str(library)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return set(re.findall(r"\bbl?\s.*<(\w+)>", listing))
