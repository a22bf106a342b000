"""Kernels that read or write where they must not, each with its clean twin."""

import torch
from checked_kernels import Buffer, Case

ACCESSES = [
    Case(
        "read past the end",
        "out-of-bounds read",
        """
kernel void run(device const float* x, device float* out, uint i [[thread_position_in_grid]]) {
  float next = i < 255 ? x[i + 1] : 0;  // @good
  float next = x[i + 1];  // @bad @here
  out[i] = next - x[i];
}""",
        (Buffer(256), Buffer(256)),
        (256,),
        (64,),
        "reads 4 bytes out of bounds, at byte offset 1024 of buffer 'x' (index 0), which has 1024 bytes",
        lambda t: t == (63, 0, 0),
    ),
    Case(
        "read before the beginning",
        "out-of-bounds read",
        """
kernel void run(device const half* x, device half* out, uint i [[thread_position_in_grid]]) {
  out[i] = x[i];
  if (i > 0)  // @good
    out[i] -= x[int(i) - 1];  // @here
}""",
        (Buffer(256, torch.half), Buffer(256, torch.half)),
        (256,),
        (64,),
        "byte offset -2 of buffer 'x' (index 0)",
        lambda t: t == (0, 0, 0),
    ),
    Case(
        "write past the end",
        "out-of-bounds write",
        """
kernel void run(device float* out, constant uint& n, uint i [[thread_position_in_grid]]) {
  if (i < n)  // @good
  if (i <= n)  // @bad
    out[i] = float(i);  // @here
}""",
        (Buffer(100), 100),
        (128,),
        (32,),
        "byte offset 400 of buffer 'out' (index 0), which has 400 bytes",
        lambda t: t == (4, 0, 0),
    ),
    Case(
        "write before the beginning",
        "out-of-bounds write",
        """
kernel void run(device char* out, uint i [[thread_position_in_grid]]) {
  int shift = i == 0 ? 0 : 1;  // @good
  int shift = 1;  // @bad
  out[int(i) - shift] = i == 0;  // @here
}""",
        (Buffer(32, torch.int8),),
        (1,),
        (1,),
        "byte offset -1 of buffer 'out'",
    ),
    Case(
        "vector that hangs over the end",
        "out-of-bounds read",
        """
kernel void run(device const float4* x, device float* out, uint i [[thread_position_in_grid]]) {
  if (i < 2)  // @good
    out[i] = dot(x[i], float4(1));  // @here
}""",
        (Buffer(10), Buffer(3)),
        (3,),
        (3,),
        "byte offset 40 of buffer 'x' (index 0), which has 40 bytes",
    ),
    Case(
        "past the end of a threadgroup variable",
        "out-of-bounds write",
        """
kernel void run(device float* out, uint t [[thread_position_in_threadgroup]]) {
  threadgroup float first[32];
  threadgroup float second[32];
  second[t] = 0;
  if (t < 31)  // @good
  first[t + 1] = 1;  // @here
  if (t == 0) first[0] = 1;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[t] = first[t] + second[t];
}""",
        (Buffer(32),),
        (32,),
        (32,),
        "byte offset 128 of a threadgroup variable of 128 bytes",
        lambda t: t == (31, 0, 0),
    ),
    Case(
        "read past a constant argument",
        "out-of-bounds read",
        """
kernel void run(device float* out, constant float* weights, uint i [[thread_position_in_grid]]) {
  out[i] = weights[i % 4];  // @good
  out[i] = weights[i];  // @bad @here
}""",
        (Buffer(5), Buffer(4)),
        (5,),
        (5,),
        "buffer 'weights' (index 1)",
    ),
    Case(
        "write through a cast to const memory",
        "write to read-only memory",
        """
kernel void run(device const float* x, device float* out, uint i [[thread_position_in_grid]]) {
  out[i] = x[i];
  ((device float*)x)[i] = 0;  // @bad @here
}""",
        (Buffer(32), Buffer(32)),
        (32,),
        (32,),
        "buffer 'x' (index 0)",
    ),
]
