"""Where a program's kernels run: on the simulated `mps` device, or on a CUDA device.

A target belongs to one program and one device. All targets have the same methods.
"""

import json
import os
import struct

import torch

from ... import _C
from ..._backends import DEVICES
from .. import cache
from ..nvidia import cuda
from . import signatures

# The devices that have a target here. On a Mac, PyTorch compiles the programs.
TARGETS = (DEVICES - {"mps"}) | ({"mps"} if hasattr(_C, "simulator_dispatch") else set())

# A program with at most COMPILED_AT_ONCE kernels is compiled as a whole. In a larger one each kernel is compiled when
# it is first used, and the first CHECKED_AT_ONCE kernels are checked for errors before.
COMPILED_AT_ONCE = 4
CHECKED_AT_ONCE = 64


def default_device():
    """Returns the device on which a call without tensors runs, and for which programs are compiled before they are
    called."""
    if "cuda" in TARGETS and not torch.backends.mps.is_available() and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else 0)
    return torch.device("mps", 0)


def target(program, device):
    """Returns the target for tensors of a device. Raises RuntimeError where nothing runs kernels there."""
    if device.type not in TARGETS:
        raise RuntimeError(f"kernels of compile_shader() cannot run on {device.type!r} tensors")
    return SimulatorTarget(program) if device.type == "mps" else CudaTarget(program, device)


class SimulatorTarget:
    memory = torch.device("cpu")  # kernels take addresses of this device

    def __init__(self, program):
        self._program = program
        self._loaded = {}
        self._information = {}

    def prepare(self):
        """Finds the errors of a program, by compiling it if it is small, for the mode in which it would run now."""
        names = self._program.names
        if len(names) <= COMPILED_AT_ONCE:
            self._shared_object(None, checking=_C.simulator_checking()[0])
            return

        from . import host

        def make(path):
            host.check_source(self._program.translation.source(names[:CHECKED_AT_ONCE]), msl=self._program.source)
            path.touch()

        cache.entry(cache.digest(self._program.digest, repr(host.find_compiler())) + ".checked", make)

    def thread_limit(self, kernel, buffers=None, lengths=()):
        if kernel not in self._information:
            found = _C.simulator_kernels(self._load(kernel, checking=_C.simulator_checking()[0]))
            self._information |= {entry["name"]: entry for entry in found}
        return self._information[kernel]["max_total_threads_per_threadgroup"]

    def static_memory(self, kernel):
        if self._program.has_threadgroup_variables(kernel):
            raise RuntimeError("the simulator learns how much threadgroup memory a kernel takes only as it runs")
        return 0

    def place(self, kernel, buffers, lengths):
        return []  # the executor checks what is bound

    def run(self, kernel, buffers, lengths, threads, group):
        checking = _C.simulator_checking()[0]
        library = self._load(kernel, checking=checking)
        _C.simulator_dispatch(library, kernel, buffers, lengths, threads, group)

    def _load(self, kernel, *, checking):
        """Returns the executor's number of a library that has the kernel."""
        names = [kernel] if len(self._program.names) > COMPILED_AT_ONCE else None
        key = (names and kernel, checking)
        if key not in self._loaded:
            self._loaded[key] = _C.simulator_load(os.fspath(self._shared_object(names, checking=checking)))
        return self._loaded[key]

    def _shared_object(self, names, *, checking):
        """Returns the path of the shared object with these kernels; None means all kernels."""
        from . import host

        compiler = " ".join([repr(host.find_compiler()), *host.arguments(checking=checking), host.cpu_identity()])
        key = cache.digest(self._program.digest, json.dumps(names), compiler)

        def make(path):
            source = self._program.translation.source(names)
            host.compile_source(source, path, checking=checking, msl=self._program.source)

        return cache.entry(key + ".so", make)


class CudaTarget:
    def __init__(self, program, device):
        self.memory = device
        self._program = program
        self._attributes = {}
        flags = ("-DMSL_ALIGNED=1",) if program.aligned else ()
        self._compiled = cuda.CudaProgram(program.digest, self._translated, msl=program.source, flags=flags)
        self._number = cuda.register(self._compiled)

    def _translated(self):
        translation = self._program.translation
        return translation.guarded, translation.cuda_kernels()

    def prepare(self):
        """Finds the errors of a program, by compiling it if it is small."""
        found = _C.cuda_info()
        if "reason" in found:
            raise RuntimeError(found["reason"])
        capability = found["devices"][self.memory.index]["arch"]
        names = self._program.names
        if len(names) <= COMPILED_AT_ONCE:
            cuda.compile_kernels(capability, [(self._number, name, self._probable_signature(name)) for name in names])
        else:
            self._compiled.check(capability)

    def thread_limit(self, kernel, buffers=None, lengths=()):
        signature = self._probable_signature(kernel) if buffers is None else signatures.of_call(buffers, lengths)
        return self._attributes_of(kernel, signature)["max_threads"]

    def static_memory(self, kernel):
        return self._attributes_of(kernel, self._probable_signature(kernel))["static_threadgroup_memory"]

    def place(self, kernel, buffers, lengths):
        """Checks that every argument is bound, and copies values that the kernel may write to into the device's memory.

        Returns:
            The tensors that hold these values, which must be kept until the kernel is launched.
        """
        held = []
        for argument in self._program.arguments(kernel):
            index, which = argument["index"], f"'{argument['name']}' at index {argument['index']}"
            if argument["kind"] == "threadgroup":
                if index >= len(lengths):
                    problem = f"threadgroup argument {which} has no length set (see threadgroup_memory of a call)"
                    raise ValueError(f"metalcore: kernel '{kernel}': {problem}")
            elif index >= len(buffers) or buffers[index] is None:
                if not argument["condition"]:
                    raise ValueError(f"metalcore: kernel '{kernel}': buffer {which} is not bound")
            elif argument["is_writable"] and isinstance(buffers[index], (bytes, list)):
                held.append(self._in_memory(buffers[index]))
                buffers[index] = held[-1].data_ptr(), held[-1].nbytes
        return held

    def run(self, kernel, buffers, lengths, threads, group):
        _C.cuda_dispatch(self._number, kernel, self.memory.index, buffers, lengths, threads, group)

    def _in_memory(self, buffer):
        if isinstance(buffer, list):
            buffer = struct.pack(f"<{len(buffer)}Q", *(address for address, _ in buffer))
        return torch.frombuffer(bytearray(buffer), dtype=torch.uint8).to(self.memory)

    def _attributes_of(self, kernel, signature):
        key = kernel, signature
        if key not in self._attributes:
            self._attributes[key] = _C.cuda_attributes(self._number, kernel, signature, self.memory.index)
        return self._attributes[key]

    def _probable_signature(self, kernel):
        return signatures.probable(self._program.arguments(kernel))
