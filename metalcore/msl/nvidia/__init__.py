"""CUDA C++ of kernels, compiled by NVRTC and linked by nvJitLink."""
