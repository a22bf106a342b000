// As a translator from SPIR-V writes kernels: arrays as classes with an operator for each address space, helpers for
// what GLSL has and MSL has not, identifiers with numbers, blocks of std140 and std430.
#pragma clang diagnostic ignored "-Wmissing-prototypes"
#pragma clang diagnostic ignored "-Wmissing-braces"

#include <metal_stdlib>
#include <simd/simd.h>

using namespace metal;

template<typename T, size_t Count>
struct block_array
{
    T items[Count ? Count : 1];

    thread T& operator [] (size_t i) thread { return items[i]; }
    constexpr const thread T& operator [] (size_t i) const thread { return items[i]; }
    device T& operator [] (size_t i) device { return items[i]; }
    constexpr const device T& operator [] (size_t i) const device { return items[i]; }
    constexpr const constant T& operator [] (size_t i) const constant { return items[i]; }
    threadgroup T& operator [] (size_t i) threadgroup { return items[i]; }
    constexpr const threadgroup T& operator [] (size_t i) const threadgroup { return items[i]; }
};

struct _31
{
    float4x4 _m0;
    packed_float3 _m1;
    float _m2;
    uint4 _m3[2];
};

struct _40
{
    float _m0[1];
};

struct _52
{
    uint count;
    float4 items[1];
};

constant uint _61_tmp [[function_constant(0)]];
constant uint _61 = is_function_constant_defined(_61_tmp) ? _61_tmp : 64u;
constant uint _62 = (_61 / 2u);
constant uint3 gl_WorkGroupSize [[maybe_unused]] = uint3(64u, 1u, 1u);
constant block_array<float, 4> _70 = block_array<float, 4>({ 0.5, 1.0, 2.0, 4.0 });

// Returns the remainder with the sign of y, as GLSL's mod() does.
template<typename Tx, typename Ty>
inline Tx mod(Tx x, Ty y)
{
    return x - y * floor(x / y);
}

template<typename T>
inline T find_lowest(T x)
{
    return select(ctz(x), T(-1), x == T(0));
}

static inline __attribute__((always_inline))
float weigh(thread const float& value, thread const uint& which, constant _31& _33)
{
    uint _80 = extract_bits(_33._m3[which >> 2u][which & 3u], 4u, 2u);
    return value * _70[_80];
}

static inline __attribute__((always_inline))
void scan(thread const uint& _90, threadgroup block_array<float, 64>& shared)
{
    for (uint _91 = 1u; _91 < gl_WorkGroupSize.x; _91 <<= 1u)
    {
        float _92 = 0.0;
        if (_90 >= _91)
        {
            _92 = shared[_90 - _91];
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        shared[_90] += _92;
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}

// An inclusive prefix sum of weighted values in each threadgroup.
kernel void main0(device _40& _44 [[buffer(0)]], const device _40& _46 [[buffer(1)]], constant _31& _33 [[buffer(2)]],
                  uint3 gl_GlobalInvocationID [[thread_position_in_grid]],
                  uint3 gl_LocalInvocationID [[thread_position_in_threadgroup]])
{
    threadgroup block_array<float, 64> _100;
    float param = _46._m0[gl_GlobalInvocationID.x];
    uint param_1 = gl_GlobalInvocationID.x & 7u;
    _100[gl_LocalInvocationID.x] = weigh(param, param_1, _33);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint param_2 = gl_LocalInvocationID.x;
    scan(param_2, _100);
    _44._m0[gl_GlobalInvocationID.x] = _100[gl_LocalInvocationID.x];
}

// Transforms positions, and wraps them; the last component is the lowest bit of the position in the grid.
kernel void main1(device _52& _110 [[buffer(0)]], constant _31& _33 [[buffer(1)]],
                  uint3 gl_GlobalInvocationID [[thread_position_in_grid]])
{
    do
    {
        if (gl_GlobalInvocationID.x >= _110.count)
        {
            break;
        }
        float4 _120 = _33._m0 * float4(_110.items[gl_GlobalInvocationID.x].xyz, 1.0);
        float3 _121 = mod((_120.xyz + float3(_33._m1)), float3(_33._m2));
        _121.yz = _121.zy;
        uint _122 = find_lowest(gl_GlobalInvocationID.x + _62);
        _110.items[gl_GlobalInvocationID.x] = float4(_121, as_type<float>(_122));
        break;
    } while (false);
}
