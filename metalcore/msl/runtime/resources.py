"""Registers and memory of kernels by NVRTC, read from what it compiles. There need not be a GPU: NVRTC also stands for
Apple's compiler, which runs on Macs alone."""

import json
import re
import struct

from .. import cache
from ..errors import CompilerNotFoundError, MSLError
from ..language.cuda_source import cuda_source
from ..nvidia import cuda, nvrtc
from . import signatures

CAPABILITY = 90
FLAGS = *nvrtc.FLAGS, *cuda._BUILTIN_FLAGS
RESERVED = 1024  # bytes of each threadgroup's memory on GPUs of this compute capability, which belong to CUDA
_ENTRY = re.compile(r'(extern "C" __global__ void )(?:__launch_bounds__\(\d+\) )?(metalcore_\d+)\(')


def source(translation, described, bounds):
    """Returns CUDA C++ of kernels, and their names there.

    Args:
        translation: of a program.
        described: its `cuda_kernels()`, or some of them.
        bounds: {kernel: how many registers it may have}. None is what its promise leaves on NVIDIA's GPUs.
    """
    requests = [
        (kernel.name, signatures.probable([vars(a) for a in kernel.arguments if a.kind in ("buffer", "threadgroup")]))
        for kernel in translation.kernels
        if kernel.name in bounds
    ]
    text, entries = cuda_source(translation.program, described, requests)
    names = dict(zip(entries, (name for name, _ in requests)))

    def bounded(entry):
        most = bounds[names[entry[2]]]
        return f"{entry[1]}__maxnreg__({most}) {entry[2]}(" if most else entry[0]

    text, count = _ENTRY.subn(bounded, text)
    assert count == len(requests)
    return text, names


def of(translation, described, bounds, *flags):
    """Returns what Cubin.resources() has of these kernels, by name."""
    if not bounds:
        return {}
    text, names = source(translation, described, bounds)
    cubin = Cubin(nvrtc.find().compile(text, CAPABILITY, flags=(*FLAGS, *flags)))
    return {name: cubin.resources(entry) for entry, name in names.items()}


def registers_of(translation, kernel):
    """Returns how many registers of 32 bits a thread of the kernel of that name has where nothing bounds them, or None
    where NVRTC is not there or does not take the kernel. The cache of programs keeps the number."""

    def make(path):
        try:
            (registers, *_) = of(translation, described, bounds)[kernel]
        except MSLError:
            registers = None
        path.write_text(json.dumps(registers), encoding="utf-8")

    try:
        compiler = nvrtc.find()
    except CompilerNotFoundError:
        return None
    described, bounds = {kernel: translation.cuda_kernels()[kernel]}, {kernel: None}
    text, _ = source(translation, described, bounds)
    key = cache.digest(text, *FLAGS, cache.translator_digest(), str(compiler.version))
    return json.loads(cache.content(f"{key}.registers.json", make))


class Cubin:
    """The sections of a cubin, which is an ELF file."""

    # Attributes of .nv.info. Each value is the number of a symbol, and a number of it.
    _FRAME_SIZE, _REGISTERS = 0x11, 0x2F

    def __init__(self, data):
        (table,) = struct.unpack_from("<Q", data, 0x28)
        size, count, names = struct.unpack_from("<3H", data, 0x3A)
        headers = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]

        def string(section, offset):
            start = headers[section][4] + offset
            return data[start : data.index(b"\0", start)].decode()

        self._sections = {string(names, header[0]): header for header in headers}
        symbols = self._sections[".symtab"]
        self._values = {}
        for attribute, number, value in self._attributes(data, self._sections[".nv.info"]):
            (name,) = struct.unpack_from("<I", data, symbols[4] + 24 * number)
            self._values[attribute, string(symbols[6], name)] = value

    @staticmethod
    def _attributes(data, section):
        """(attribute, number of a symbol, value). A record has a format, an attribute, and 16 bits: a value or the size
        of what follows."""
        at, end = section[4], section[4] + section[5]
        while at < end:
            form, attribute, size = struct.unpack_from("<BBH", data, at)
            at += 4
            if form == 4:  # `size` bytes follow
                if size == 8:
                    yield attribute, *struct.unpack_from("<II", data, at)
                at += size

    def resources(self, entry):
        """(registers, bytes of local memory of a thread, bytes of static threadgroup memory) of a kernel."""
        shared = self._sections.get(f".nv.shared.{entry}")
        return (
            self._values[self._REGISTERS, entry],
            self._values[self._FRAME_SIZE, entry],
            shared[5] - RESERVED if shared else 0,
        )
