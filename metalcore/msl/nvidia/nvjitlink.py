"""nvJitLink, NVIDIA's linker as a library, which assembles PTX. It comes with PyTorch's packages for CUDA, as NVRTC
does."""

import ctypes
import functools
import os
import re
import threading

from . import nvrtc

_PTX = 2  # nvJitLinkInputType


class NvJitLink:
    """An nvJitLink library. It is opened when it first assembles."""

    def __init__(self, path):
        self.path = path
        self._lock = threading.Lock()
        self._library = None

    def assemble(self, ptx, capability, flags=()):
        """Returns the cubin of PTX for a GPU of this compute capability, or None where this library cannot make one:
        for example, where it is older than the compiler of the PTX. Several threads may call it at once."""
        target = re.search(rb"^\.target (sm_\w+)", ptx, re.MULTILINE)  # sm_90a where NVRTC was told so
        architecture = target[1].decode() if target else f"sm_{capability}"
        lines = [flag for flag in flags if flag in ("-lineinfo", "--generate-line-info")]
        options = [f"-arch={architecture}", *lines]
        handle, size = ctypes.c_void_p(), ctypes.c_size_t()
        texts = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        try:
            library = self._open()
            if library.nvJitLinkCreate(ctypes.byref(handle), ctypes.c_uint32(len(options)), texts):
                return None
        except (OSError, AttributeError):  # the file is missing, or another library
            return None
        try:
            if library.nvJitLinkAddData(handle, _PTX, ptx, ctypes.c_size_t(len(ptx)), b"msl_program"):
                return None
            if library.nvJitLinkComplete(handle) or library.nvJitLinkGetLinkedCubinSize(handle, ctypes.byref(size)):
                return None
            cubin = ctypes.create_string_buffer(size.value)
            return None if library.nvJitLinkGetLinkedCubin(handle, cubin) else cubin.raw
        finally:
            library.nvJitLinkDestroy(ctypes.byref(handle))

    def _open(self):
        with self._lock:
            if self._library is None:
                self._library = ctypes.CDLL(os.fspath(self.path))
            return self._library


def find():
    """Returns the nvJitLink to use, or None: the one that this process has open, or that lies where NVRTC does, of
    NVRTC's major version."""
    return _find(nvrtc.find(), os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"))


@functools.lru_cache(maxsize=8)
def _find(compiler, *homes):
    name = f"libnvJitLink.so.{compiler.version[0]}"
    for folder in (compiler.path.parent, *nvrtc.folders(homes)):
        if (folder / name).exists():
            return NvJitLink(folder / name)
    return None
