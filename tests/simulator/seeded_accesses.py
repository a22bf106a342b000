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
        "reads 4 bytes out of bounds, at element 256 of 256 of buffer 'x' (index 0), right after its end",
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
        "element -1 of 256 of buffer 'x' (index 0), 2 bytes before its start",
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
        "element 100 of 100 of buffer 'out' (index 0), right after its end",
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
        "byte -1 of 32 of buffer 'out' (index 0), 1 byte before its start",
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
        "byte 40 of 40 of buffer 'x' (index 0), right after its end",
    ),
    Case(
        "past the end of a threadgroup variable",
        "out-of-bounds write, out-of-bounds index",  # where the compiler knows the variable
        """
kernel void run(device float* out, uint t [[thread_position_in_threadgroup]]) {
  threadgroup float first[32];
  threadgroup float second[32];
  second[t] = 0;
  if (t < 31)  // @good
  *(first + t + 1) = 1;  // @here
  if (t == 0) first[0] = 1;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[t] = first[t] + second[t];
}""",
        (Buffer(32),),
        (32,),
        (32,),
        thread=lambda t: t == (31, 0, 0),
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
    Case(
        "far from every buffer",
        "out-of-bounds write",
        """
kernel void run(device float* x, uint i [[thread_position_in_grid]]) {
  x[i] = 0;  // @good
  x[(1l << 44) + i] = 0;  // @bad @here
}""",
        (Buffer(4),),
        (4,),
        (4,),
        "writes 4 bytes at an address that is in no buffer and near none",
    ),
    Case(
        "store by a literal null",
        "out-of-bounds write",
        """
kernel void run(device float* x, uint i [[thread_position_in_grid]]) {
  device float* p = nullptr;
  if (x[i] < 0)  // @good
  *p = 1;  // @here
  x[i] = 2;
}""",
        (Buffer(4),),
        (4,),
        (4,),
        "writes 4 bytes through a null pointer",
    ),
    Case(
        "index beyond a private array",
        "out-of-bounds index",
        """
kernel void run(device float* x, device const int* at, uint i [[thread_position_in_grid]]) {
  float own[8];
  for (int k = 0; k < 8; ++k) own[k] = x[k];
  own[at[i] & 7] = 3;  // @good
  own[at[i] + 8] = 3;  // @bad @here
  float sum = 0;
  for (int k = 0; k < 8; ++k) sum += own[k];
  x[8 + i] = sum;
}""",
        (Buffer(12), Buffer(4, torch.int32)),
        (4,),
        (4,),
        "uses index 8 of 8 elements (float",
    ),
    Case(
        "index before a private array of a struct",
        "out-of-bounds index",
        """
struct State { float own[4]; int count; };
kernel void run(device float* x, device const char* at, uint i [[thread_position_in_grid]]) {
  State state = {{1, 2, 3, 4}, 0};
  state.own[at[i]] = 3;  // @good
  state.own[at[i] - 1] = 3;  // @bad @here
  x[i] = state.own[0] + state.own[3];
}""",
        (Buffer(4), Buffer(4, torch.int8)),
        (4,),
        (4,),
        "uses index -1 of 4 elements",
    ),
    Case(
        "private array by a pointer",
        "out-of-bounds write",
        """
__attribute__((noinline)) void put(thread float* p, int at) {
  p[at] = 1;  // @here
}
kernel void run(device float* x, device const int* at, uint i [[thread_position_in_grid]]) {
  float own[4] = {1, 2, 3, 4};
  put(own, at[i] + 3);  // @good
  put(own, at[i] - 3000);  // @bad
  x[i] = own[0] + own[3];
}""",
        (Buffer(12), Buffer(4, torch.int32)),
        (4,),
        (4,),
        "out of bounds, beyond the thread's own variables",
    ),
    Case(
        "index beyond a vector",
        "out-of-bounds index",
        """
kernel void run(device float* x, device const int* at, uint i [[thread_position_in_grid]]) {
  float3 v = x[i];
  packed_half2 p = packed_half2(1, 2);
  float4x2 m = float4x2(1);
  m[at[i] + 3][at[i] + 1] = p[at[i]];
  v[at[i] + 2] = 1;  // @good
  v[at[i] + 3] = 1;  // @bad @here
  x[i] = v.x + v.z + m[3].y;
}""",
        (Buffer(12), Buffer(4, torch.int32)),
        (4,),
        (4,),
        "uses index 3 of 3 elements",
    ),
    Case(
        "index beyond a matrix",
        "out-of-bounds index",
        """
kernel void run(device float* x, device const int* at, uint i [[thread_position_in_grid]]) {
  float3x2 m = float3x2(1);
  m[at[i] + 2].x = 2;  // @good
  m[at[i] + 3].x = 2;  // @bad @here
  x[i] = m[2].y;
}""",
        (Buffer(12), Buffer(4, torch.int32)),
        (4,),
        (4,),
        "uses index 3 of 3 elements",
    ),
    Case(
        "word at an odd address",
        "misaligned access",
        """
struct __attribute__((packed)) Block { ushort scale; uint bits; };
kernel void run(device uint* out, device const uchar* blocks, uint i [[thread_position_in_grid]]) {
  out[i] = ((device const Block*)blocks)[i].bits;  // @good
  out[i] = *(device const uint*)(blocks + 8 * i + 2);  // @bad @here
  device const packed_float3* packed = (device const packed_float3*)(blocks + 4);
  out[i] += uint(packed[i].y);
}""",
        (Buffer(4, torch.int32), Buffer(64, torch.uint8)),
        (4,),
        (4,),
        "that is no multiple of 4",
    ),
]
