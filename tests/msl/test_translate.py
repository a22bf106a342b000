"""The results of translated MSL: each test runs a small program on the device."""

import pytest
import torch

import metalcore

HEADER = "#include <metal_stdlib>\nusing namespace metal;\n"


def run(device, body, *arguments, out=8, dtype=torch.float32, constants=None, **launch):
    """Runs kernel `k` of `body` on an output of `out` elements and the arguments; returns the output on the CPU."""
    result = torch.zeros(out, dtype=dtype, device=device)
    library = metalcore.compile_shader(HEADER + body, constants=constants)
    library.k(result, *arguments, **launch)
    return result.cpu()


def test_address_spaces_and_their_overloads(device):
    body = """
        float twice(device float* x) { return 2 * *x; }
        float twice(threadgroup float* y) { return 2 * *y; }
        float twice(thread float& z) { return 2 * z; }
        template <typename T> struct Box {
          T value;
          T get() const device { return value; }
          T get() const threadgroup { return value; }
          T get() const thread { return value; }
          T get() const constant { return value; }
        };
        template <typename T> struct is_far { static constant constexpr const int value = 0; };
        template <typename T> struct is_far<device T*> { static constant constexpr const int value = 1; };
        template <typename T> struct is_far<constant T*> { static constant constexpr const int value = 2; };
        constant Box<float> fixed = {7.0};
        constant constexpr float table[] = {1, 2, 3};
        static constant const float more[2] = {4, 5};
        float read(constant const float* values, int i) { return values[i]; }
        kernel void k(device float* out, uint i [[thread_position_in_grid]]) {
          threadgroup float shared;
          shared = 3;
          thread float mine = 4;
          Box<float> box = {5};
          out[0] = 1.5;
          out[1] = twice(out);
          out[2] = twice(&shared);
          out[3] = twice(mine);
          out[4] = box.get() + fixed.get();
          out[5] = read(table, 2) + more[1];
          out[6] = is_far<device float*>::value + 10 * is_far<constant float*>::value;
          out[7] = *(thread float*)&mine;
        }"""
    assert run(device, body, threads=1).tolist() == [1.5, 3, 6, 8, 12, 8, 21, 4]


def test_swizzles_and_members_that_look_like_them(device):
    body = """
        struct Point { float xy; float rgb; };
        kernel void k(device float* out) {
          float4 v = float4(1, 2, 3, 4);
          v.xz = v.yw;
          v.wy += float2(10, 20);
          float3 c = v.bgr;
          Point p = {5, 6};
          p.xy *= 2;
          out[0] = v.x; out[1] = v.y; out[2] = v.z; out[3] = v.w;
          out[4] = c.x; out[5] = p.xy; out[6] = p.rgb; out[7] = v.xyzw.yx.x;
        }"""
    assert run(device, body, threads=1).tolist() == [2, 22, 4, 14, 4, 10, 6, 22]


def test_one_name_for_a_member_and_a_swizzle(device):
    body = """
        template <typename T> struct Box {
          T xy, zw;
          float area(float2 zw, float extra) const { return (xy.xy + zw.xy).x * extra; }
          union { float4 rgba; float parts[4]; };
          struct Inner { int xz[3] = {1, 2, 3}; } inner;
        };
        float second(thread const Box<float2>& box) { return box.xy.xy.y; }
        void scale(thread float2& v) { v *= 2; }
        kernel void k(device float* out) {
          struct Local { packed_float2 xy; } local = {.xy = float2(1, 2)};
          float4 v = float4(1, 2, 3, 4);
          packed_float3 p = packed_float3(5, 6, 7);
          Box<float2> box{v.xy, v.zw};
          box.xy.xy = box.zw.yx;
          box.xy += v.xy;
          v.xy += 10;
          scale(box.zw);
          box.rgba = v.rgba;
          box.inner.xz[1] += int2(p.xz).y;
          p.xy = local.xy + p.xy;
          thread Box<float2>* pointer = &box;
          pointer->zw.x = 100;
          out[0] = box.xy.x; out[1] = second(box); out[2] = v.x; out[3] = box.zw.x; out[4] = box.zw.y;
          out[5] = box.parts[1]; out[6] = box.inner.xz[1]; out[7] = p.x; out[8] = p.y; out[9] = box.area(1, 2);
        }"""
    assert run(device, body, threads=1, out=10).tolist() == [5, 5, 11, 100, 8, 12, 9, 6, 8, 12]


def test_literals(device):
    body = """
        kernel void k(device float* out) {
          out[0] = 1.0 / 3.0;
          out[1] = 0.1h;
          out[2] = 0.1bf;
          out[3] = 0x1.8p1;
          out[4] = 1e-3;
          out[5] = 1. + .5;
          out[6] = as_type<float>(0x3f800000u);
          out[7] = sizeof(1.0) + 0xFF;
        }"""
    expected = torch.tensor([1 / 3, 0, 0, 3, 1e-3, 1.5, 1, 259])
    expected[1], expected[2] = torch.tensor(0.1).half().float(), torch.tensor(0.1).bfloat16().float()
    assert torch.equal(run(device, body, threads=1), expected)


@pytest.mark.parametrize("type, dtype", [("half", torch.float16), ("bfloat", torch.bfloat16)])
def test_conditionals_that_mix_types(device, type, dtype):
    body = f"""
        template <typename T> bool same(T a, T b) {{ return a == b; }}
        template <int n> int value() {{ return n; }}
        kernel void k(device float* out, device const {type}* x, uint i [[thread_position_in_grid]]) {{
          {type} v = x[i];
          float a = v > 0.0 ? v : 0.0f;
          float b = v > 0 ? 1 : v;
          float c = same<int>(1, 1) ? a < b ? v : a : b;
          out[i] = a + 10 * b + 100 * c + value<(sizeof({type}) == 2 ? 3 : 4)>() + (i < 2 && i > 0 ? v : {type}(2.0));
        }}"""
    x = torch.tensor([0.5, -2.0, 3.0], dtype=dtype)
    expected = []
    for i, v in enumerate(x.tolist()):
        a, b = max(v, 0.0), 1.0 if v > 0 else v
        expected.append(a + 10 * b + 100 * (v if a < b else a) + 3 + (v if i == 1 else 2.0))
    assert run(device, body, x.to(device), out=3, threads=3).tolist() == expected


def test_threadgroup_variables(device):
    body = """
        template <typename T, int N>
        float helper(threadgroup T* x, threadgroup T (&all)[N], uint i) { return x[i] + all[N - 1 - i]; }
        struct Pair { float a; int b; };
        template <typename T, int N>
        kernel void many(device float* out, uint i [[thread_index_in_threadgroup]]) {
          threadgroup T a[N], b[N > 4 ? N : 4][2];
          threadgroup Pair pair;
          threadgroup T filled[2] = {T(3)};
          const threadgroup T* alias = a;
          a[i] = i;
          b[i][1] = 10 * i;
          if (i == 0) pair = Pair{100, 1000};
          threadgroup_barrier(mem_flags::mem_threadgroup);
          out[i] = helper(a, a, i) + b[N - 1 - i][1] + pair.a + pair.b + alias[0] + filled[0] + filled[1];
        }
        template [[host_name("k")]] kernel void many<float, 8>(device float*, uint);"""
    assert run(device, body, threads=8, group_size=8).tolist() == [7 + 10 * (7 - i) + 1103 for i in range(8)]


def test_every_position_in_every_type(device):
    body = """
        kernel void k(device uint* out, uint3 p [[thread_position_in_grid]],
                      ushort2 q [[thread_position_in_threadgroup]],
                      uint i [[thread_index_in_threadgroup]], uint2 g [[threadgroup_position_in_grid]],
                      ushort3 n [[threads_per_grid]], uint3 t [[threads_per_threadgroup]],
                      uint d [[dispatch_threads_per_threadgroup]], uint2 c [[threadgroups_per_grid]],
                      ushort lane [[thread_index_in_simdgroup]], uint s [[simdgroup_index_in_threadgroup]],
                      uint w [[threads_per_simdgroup]], ushort quad [[quadgroup_index_in_threadgroup]],
                      ushort in_quad [[thread_index_in_quadgroup]], uint m [[simdgroups_per_threadgroup]]) {
          uint at = (p.y * n.x + p.x) * 14;
          uint values[14] = {p.x, q.x, q.y, i, g.x, g.y, t.x, t.y, d, c.x * 10 + c.y, lane, s * 100 + w,
                             uint(quad * 10 + in_quad), m};
          for (int j = 0; j < 14; ++j) out[at + j] = values[j];
        }"""
    width, height, group = 70, 3, (40, 2)
    out = run(device, body, out=width * height * 14, dtype=torch.int32, threads=(width, height), group_size=group)
    for y in range(height):
        for x in range(width):
            size = (min(group[0], width - x // 40 * 40), min(group[1], height - y // 2 * 2))
            index = y % 2 * size[0] + x % 40
            simdgroups = -(-size[0] * size[1] // 32)
            expected = [x, x % 40, y % 2, index, x // 40, y // 2, *size, 40, 22, index % 32, index // 32 * 100 + 32,
                        index // 4 * 10 + index % 4, simdgroups]  # fmt: skip
            assert out.view(height, width, 14)[y, x].tolist() == expected


def test_function_constants(device):
    body = """
        constant int count [[function_constant(0)]];
        constant float scale [[function_constant(1)]];
        constant bool extra [[function_constant(2)]];
        constant uint2 pair [[function_constant(3)]];
        constant int steps = is_function_constant_defined(count) ? count : 2;
        constant bool has_scale = is_function_constant_defined(scale);
        kernel void k(device float* out, device const float* more [[buffer(1), function_constant(extra)]]) {
          float sum = 0;
          for (int i = 0; i < steps; ++i) sum += has_scale ? scale : 1;
          if (extra) sum += more[0];
          out[0] = sum + pair.x * 100 + pair.y * 1000;
        }"""
    more = torch.tensor([0.5], device=device)
    assert run(device, body, threads=1)[0] == 2
    assert run(device, body, more, threads=1, constants={"count": 3, 1: 2.5, "extra": True, 3: (1, 2)})[0] == 2108
    for declared in ("constant int a [[function_constant(0)]] = 7;", "constant float* a [[function_constant(0)]];"):
        with pytest.raises(metalcore.msl.errors.MSLError, match="'a' must be a number or a vector, without a value"):
            run(device, declared + body)
    with pytest.raises(metalcore.msl.errors.MSLError, match="no function constant 'missing'"):
        run(device, body, threads=1, constants={"missing": 1})


def test_specializations_inside_a_class_and_designated_ranges(device):
    body = """
        struct Op {
          template <typename T> T operator()(T x) { return x + 1; }
          template <> float operator()(float x) { return x * 10; }
          template <> half operator()<half>(half x) { return x * 20; }
        };
        kernel void k(device float* out) {
          float sums[4] = { [0 ... 3] = 2.0f };
          out[0] = Op()(3.0f); out[1] = Op()(3); out[2] = Op()(half(2)); out[3] = sums[0] + sums[3];
        }"""
    assert run(device, body, threads=1).tolist()[:4] == [30, 4, 40, 4]


def test_small_floats_in_unions_and_overload_sets(device):
    body = """
        typedef half number;
        struct Block { union { struct { number d; number m; }; half2 both; }; uchar bits[4]; };
        struct Complex { float re, im; template <typename T> Complex(T x) : re(x), im(0) {} };
        float pick(float x) { return x; }
        float pick(Complex c) { return -c.re; }
        kernel void k(device float* out, device const Block* blocks) {
          device const half* d = &blocks[1].d;
          out[0] = blocks[1].d * 2 + blocks[1].m;
          out[1] = d[0] + d[1];
          out[2] = blocks[1].both.y;
          out[3] = pick(blocks[1].both.x) + pick(half(1)) + pick(Complex(5));
          out[4] = sizeof(Block);
        }"""
    blocks = torch.tensor([0, 0, 0, 0, 1.5, 4.0, 0, 0], dtype=torch.float16, device=device)
    assert run(device, body, blocks, threads=1).tolist()[:5] == [7, 5.5, 4, -2.5, 8]


def test_programs_may_use_names_of_the_c_library_and_extend_metal(device):
    body = """
        typedef bfloat small;
        namespace metal { inline small halved(small x) { return small(float(x) / 2); } }
        constant int index = 3;
        float read(float x) { return x + 1; }
        float max(float a, bool b) { return b ? a : 0; }
        namespace linux { constant int unix = 4; }
        kernel void k(device float* out) {
          out[0] = index; out[1] = read(1); out[2] = max(1.0f, true) + max(2.0f, 3.0f); out[3] = linux::unix;
          out[4] = metal::halved(small(3.0));
        }"""
    assert run(device, body, threads=1).tolist()[:5] == [3, 2, 4, 4, 1.5]


@pytest.mark.parametrize("dtype, type", [(torch.float32, "float"), (torch.float16, "half"), (torch.bfloat16, "bfloat")])
def test_elementwise(device, dtype, type):
    body = f"""
        template <typename T> kernel void silu(device T* out, device const T* x, uint i [[thread_position_in_grid]]) {{
          float v = x[i];
          out[i] = T(v / (1 + exp(-v)));
        }}
        template [[host_name("k")]] kernel void silu<{type}>(device {type}*, device const {type}*, uint);"""
    x = torch.randn(3001, dtype=dtype)
    actual = run(device, body, x.to(device), out=3001, dtype=dtype)
    exact = torch.nn.functional.silu(x.double())
    # One rounding to the type; exp is good to 2 ulp and two more float operations follow.
    bound = exact.abs() * (torch.finfo(dtype).eps / 2 + 8 * torch.finfo(torch.float32).eps) + torch.finfo(dtype).tiny
    assert ((actual.double() - exact).abs() <= bound).all()
