"""quantize of CPU tensors on all cores beside ggml's quantizers on one, and the squared errors of both.

    python -m benchmarks.quantize_on_cpu --ggml site-packages/llama_cpp/lib/libggml-base.so

The library is ggml's, as llama-cpp-python and builds of llama.cpp have it. Times are the least of several calls.
"""

import argparse
import ctypes
import time

import torch

import metalcore
from metalcore.quant import type_of

TYPES = "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4 TQ1_0 TQ2_0".split()


def ggml_quantizer(path):
    """Returns ggml_quantize_chunk(type, from, to, first, rows, length, importance) of the library."""
    function = ctypes.CDLL(path).ggml_quantize_chunk
    function.restype = ctypes.c_size_t
    function.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    return function


def least_time(call, rounds):
    """Returns the milliseconds of the fastest call."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def squared_error(packed, type, numbers):
    return (metalcore.dequantize(packed, type).double() - numbers.double()).square().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ggml", required=True, metavar="FILE", help="libggml-base.so or libggml.so")
    parser.add_argument("--rows", type=int, default=1024, help="rows of 4096 numbers (1024)")
    parser.add_argument("--rounds", type=int, default=7, help="calls of either side (7)")
    options = parser.parse_args()
    quantize_chunk = ggml_quantizer(options.ggml)
    numbers = torch.randn(options.rows, 4096, generator=torch.Generator().manual_seed(0))
    print(f"{options.rows} x 4096 numbers in float32; metalcore on {torch.get_num_threads()} cores, ggml on one")
    for type in TYPES:
        packed = metalcore.quantize(numbers, type)
        theirs = torch.empty_like(packed)
        arguments = type_of(type).number, numbers.data_ptr(), theirs.data_ptr(), 0, *numbers.shape, None
        our_time = least_time(lambda type=type: metalcore.quantize(numbers, type), options.rounds)
        their_time = least_time(lambda arguments=arguments: quantize_chunk(*arguments), options.rounds)
        errors = squared_error(packed, type, numbers), squared_error(theirs, type, numbers)
        print(
            f"  {type:<7} {our_time:7.1f} ms  ggml {their_time:7.1f} ms  {their_time / our_time:5.2f} times as fast"
            f"  squared error {errors[0]:.4g}  ggml {errors[1]:.4g}",
            flush=True,
        )


if __name__ == "__main__":
    main()
