"""What the host pays for launching an empty kernel on an NVIDIA GPU, without any framework."""

from __future__ import annotations

import ctypes

import torch

PTX = b".version 7.0\n.target sm_52\n.address_size 64\n.visible .entry empty() { ret; }\n"


def bare_launch():
    """(launch, refused): the first function launches an empty kernel. The second makes the same call with a grid of no
    threadgroups, which the driver refuses at once. The difference of their times is the launch without ctypes."""
    cuda = ctypes.CDLL("libcuda.so.1")
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    torch.cuda.synchronize()  # makes the device's primary context current
    _check(cuda.cuModuleLoadData(ctypes.byref(module), PTX))
    _check(cuda.cuModuleGetFunction(ctypes.byref(kernel), module, b"empty"))
    grid, *rest = [ctypes.c_uint(value) for value in (1, 1, 1, 32, 1, 1, 0)]
    stream, none = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream), ctypes.c_uint(0)
    call = cuda.cuLaunchKernel
    _check(call(kernel, grid, *rest, stream, None, None))
    return lambda: call(kernel, grid, *rest, stream, None, None), lambda: call(kernel, none, *rest, stream, None, None)


def _check(status):
    if status:
        raise RuntimeError(f"libcuda: error {status} from an empty kernel")
