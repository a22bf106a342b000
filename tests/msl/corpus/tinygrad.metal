// As a code generator writes kernels: unrolled, every index computed by hand, aligned threadgroup memory, fragments of
// simdgroup matrices filled element by element.
#include <metal_stdlib>
using namespace metal;

float2 mma_8_8_8_float(float2 x, float2 y, float2 z) {
  simdgroup_float8x8 a, b, c;
  a.thread_elements()[0] = x[0]; a.thread_elements()[1] = x[1];
  b.thread_elements()[0] = y[0]; b.thread_elements()[1] = y[1];
  c.thread_elements()[0] = z[0]; c.thread_elements()[1] = z[1];
  simdgroup_multiply_accumulate(c, a, b, c);
  return float2(c.thread_elements()[0], c.thread_elements()[1]);
}

// Sums of 24 rows of 256: 16 threads a row, four values a step.
kernel void r_24_16_4_4(device float* data0_24, device float* data1_6144,
                        uint3 gid [[threadgroup_position_in_grid]], uint3 lid [[thread_position_in_threadgroup]]) {
  threadgroup __attribute__((aligned(16))) float temp0[16];
  float acc0[1];
  float acc1[1];
  int gidx0 = gid.x; /* 24 */
  int lidx0 = lid.x; /* 16 */
  *(acc0+0) = 0.0f;
  for (int ridx0 = 0; ridx0 < 4; ridx0++) {
    float4 val0 = *((device float4*)((data1_6144+((gidx0<<8)+(lidx0<<4)+(ridx0<<2)))));
    *(acc0+0) = (*(acc0+0)+val0.x+val0.y+val0.z+val0.w);
  }
  *(temp0+lidx0) = (*(acc0+0));
  threadgroup_barrier(mem_flags::mem_threadgroup);
  *(acc1+0) = 0.0f;
  for (int ridx1 = 0; ridx1 < 16; ridx1++) {
    float val1 = (*(temp0+ridx1));
    *(acc1+0) = ((*(acc1+0))+val1);
  }
  bool alu0 = (lidx0==0);
  if (alu0) {
    *(data0_24+gidx0) = (*(acc1+0));
  }
}

// 16x8 @ 8x24 in tiles of 8x8, one simdgroup each.
kernel void r_2_3_32_8(device float* data0_384, device float* data1_128, device float* data2_192,
                       uint3 gid [[threadgroup_position_in_grid]], uint3 lid [[thread_position_in_threadgroup]]) {
  int gidx0 = gid.x; /* 3 */
  int gidx1 = gid.y; /* 2 */
  int lidx0 = lid.x; /* 32 */
  int alu0 = (((lidx0>>1)&3)+((lidx0>>4)<<2));
  int alu1 = (((lidx0&1)<<1)+(((lidx0>>3)&1)<<2));
  float2 val0 = float2((*(data1_128+((gidx1<<6)+(alu0<<3)+alu1))),(*(data1_128+((gidx1<<6)+(alu0<<3)+alu1+1))));
  float2 val1 = float2((*(data2_192+((alu0*24)+(gidx0<<3)+alu1))),(*(data2_192+((alu0*24)+(gidx0<<3)+alu1+1))));
  float2 wmma0 = mma_8_8_8_float(val0, val1, float2(0.0f,0.0f));
  int alu2 = ((gidx1*192)+(alu0*24)+(gidx0<<3)+alu1);
  *((device float2*)((data0_384+alu2))) = wmma0;
}

// Quantize: the largest magnitude of each 32 bytes' worth, and the codes.
kernel void E_8_32(device half* data0_8, device signed char* data1_256, device half* data2_256,
                   uint3 gid [[threadgroup_position_in_grid]], uint3 lid [[thread_position_in_threadgroup]]) {
  int gidx0 = gid.x; /* 8 */
  int lidx0 = lid.x; /* 32 */
  half val0 = (*(data2_256+((gidx0<<5)+lidx0)));
  threadgroup __attribute__((aligned(16))) half temp0[32];
  *(temp0+lidx0) = ((val0<((half)(0.0f)))?(-val0):val0);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  half acc0 = ((half)(0.0f));
  for (int ridx0 = 0; ridx0 < 32; ridx0++) {
    half val1 = (*(temp0+ridx0));
    acc0 = ((acc0<val1)?val1:acc0);
  }
  float alu0 = (((float)(acc0))*0.007874015748031496f);
  *(data1_256+((gidx0<<5)+lidx0)) = ((signed char)(rint(((float)(val0))*(1/alu0))));
  if (lidx0==0) {
    *(data0_8+gidx0) = ((half)(alu0));
  }
}
