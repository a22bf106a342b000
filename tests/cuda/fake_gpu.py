"""For programs that drive the CUDA backend with a driver that only takes notes (fake_driver.c), without PyTorch.

`python fake_gpu.py <fake libcuda.so.1> <fake libtorch_cuda.so> <_C.abi3.so> <torch/lib>` runs the program on stdin with
this module's names. This module decodes parameter blocks by nothing but the signatures that the compiler was given.
"""

import ctypes
import importlib.machinery
import importlib.util
import struct
import sys
from dataclasses import dataclass

driver = torch_cuda = C = None


def load(driver_path, torch_cuda_path, extension, torch_lib):
    """Loads the fakes, whose sonames then replace the real libraries, and the extension."""
    global driver, torch_cuda, C
    ctypes.CDLL(f"{torch_lib}/libtorch_cpu.so", mode=ctypes.RTLD_GLOBAL)
    if driver_path != "none":
        driver = ctypes.CDLL(driver_path)
        driver.fake_launch.restype = ctypes.POINTER(LaunchRecord)
    if torch_cuda_path != "none":
        torch_cuda = ctypes.CDLL(torch_cuda_path)
    loader = importlib.machinery.ExtensionFileLoader("metalcore._C", extension)
    C = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(C)


class LaunchRecord(ctypes.Structure):
    _fields_ = [
        ("entry", ctypes.c_char * 256),
        ("device", ctypes.c_int),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("overlaps", ctypes.c_int),
        ("together", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("parameter_bytes", ctypes.c_uint),
        ("parameters", ctypes.c_ubyte * 32768),
    ]


# ---- the compiler


def members(signature):
    """[(kind, index, bytes)] of a signature, in the order of the parameter block."""
    found = []
    for part in filter(None, signature.split(",")):
        index, _, capacity = part[1:].partition(":")
        found.append((part[0], int(index), int(capacity) if capacity else 8))
    order = [("bti".index(kind), index) for kind, index, _ in found]
    assert order == sorted(order), signature
    return found


def block_bytes(signature):
    addresses = sum(size for kind, _, size in members(signature) if kind != "i")
    return -(-(48 + addresses) // 16) * 16 + sum(size for kind, _, size in members(signature) if kind == "i")


class Compiler:
    """A compiler that gives code for every kernel and keeps the requests."""

    def __init__(self, threads=1024, shared=0, more=""):
        self.threads = threads
        self.shared = shared
        self.more = more  # of the code, such as names of variables
        self.calls = []  # (arch, requests)
        C.cuda_set_compiler(self)

    def __call__(self, arch, requests):
        self.calls.append((arch, list(requests)))
        return [
            self.code(f"{kernel}@{signature}@{arch}@{program}", block_bytes(signature))
            for program, kernel, signature in requests
        ]

    def code(self, entry, block):
        code = f"entry {entry} block {block} threads {self.threads} shared {self.shared} {self.more}"
        return code.encode(), entry, "fake.metal"


# ---- launches


@dataclass
class Launch:
    kernel: str
    signature: str
    arch: int
    program: int
    device: int
    grid: tuple
    block: tuple
    shared: int
    overlaps: bool
    together: int
    stream: int
    threads_per_grid: tuple
    threads_per_threadgroup: tuple
    threadgroups_per_grid: tuple
    first_threadgroup: tuple
    values: dict  # "b0": address, "t0": offset, "i2": bytes


def launches():
    return [decoded(driver.fake_launch(i).contents) for i in range(driver.fake_launch_count())]


def decoded(record):
    kernel, signature, arch, program = record.entry.decode().split("@")
    block = bytes(record.parameters[: record.parameter_bytes])
    grid = struct.unpack_from("<12I", block)
    at, values, inline = 48, {}, False
    for kind, index, size in members(signature):
        if kind == "i" and not inline:
            at, inline = -(-at // 16) * 16, True
        values[f"{kind}{index}"] = block[at : at + size] if kind == "i" else struct.unpack_from("<Q", block, at)[0]
        at += size
    return Launch(
        kernel,
        signature,
        int(arch),
        int(program),
        record.device,
        tuple(record.grid),
        tuple(record.block),
        record.shared,
        bool(record.overlaps),
        record.together,
        record.stream or 0,
        grid[0:3],
        grid[3:6],
        grid[6:9],
        grid[9:12],
        values,
    )


def dispatch(kernel="k", buffers=(), lengths=(), threads=(1, 1, 1), group=(1, 1, 1), *, program=0, device=0):
    """Calls cuda_dispatch and returns the launches that it made."""
    before = driver.fake_launch_count()
    C.cuda_dispatch(program, kernel, device, list(buffers), list(lengths), threads, group)
    return launches()[before:]


def refusal(kind, *arguments, **options):
    """The message of the exception that dispatch() raises, after a check that it launched nothing."""
    before = driver.fake_launch_count()
    caught = None
    try:
        dispatch(*arguments, **options)
    except kind as error:
        caught = error
    assert type(caught) is kind, f"{type(caught).__name__} instead of {kind.__name__}"
    assert driver.fake_launch_count() == before
    return str(caught)


if __name__ == "__main__":
    load(*sys.argv[1:])
    exec(compile(sys.stdin.read(), "<test>", "exec"), globals())
