"""Math functions of <metal_stdlib> against float64."""

import numpy as np
import pytest
import torch

import metalcore

pytestmark = pytest.mark.usefixtures("compiles_for_cuda")


def sinpi(x):
    r = np.fmod(x, 2.0)
    return np.where(r == np.trunc(r), np.copysign(0.0, x), np.sin(np.pi * r))


def cospi(x):
    r = np.abs(np.fmod(x, 2.0))
    return np.where((r == 0.5) | (r == 1.5), 0.0, np.cos(np.pi * r))


# name -> float64 function
UNARY = {
    "acos": np.arccos, "acosh": np.arccosh, "asin": np.arcsin, "asinh": np.arcsinh, "atan": np.arctan,
    "atanh": np.arctanh, "ceil": np.ceil, "cos": np.cos, "cosh": np.cosh, "exp": np.exp,
    "exp10": lambda x: np.power(10.0, x), "exp2": np.exp2, "fabs": np.abs, "floor": np.floor, "log": np.log,
    "log10": np.log10, "log2": np.log2, "rint": np.rint, "rsqrt": lambda x: 1 / np.sqrt(x), "sin": np.sin,
    "sinh": np.sinh, "sqrt": np.sqrt, "tan": np.tan, "tanh": np.tanh, "trunc": np.trunc,
    "round": lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x), "sinpi": sinpi, "cospi": cospi,
}  # fmt: skip
BINARY = {
    "pow": np.power, "powr": np.power, "atan2": np.arctan2, "fmod": np.fmod, "fmin": np.fmin, "fmax": np.fmax,
    "copysign": np.copysign,
    "fdim": lambda x, y: np.where(np.isnan(x) | np.isnan(y), x + y, np.where(x > y, x - y, 0.0)),
    "divide": np.divide,
}  # fmt: skip
# The largest errors in units of the last place: the simulator's, and those of CUDA's own functions (CUDA C++
# Programming Guide, "Mathematical Functions": at most 2, except for these). CUDA counts in units of the result: if that
# has the next exponent, an error of 2 is 3 or more of our units. MSL allows 4 to 16.
SIMULATOR_BOUND = 2
CUDA_BOUND = 3
CUDA_BOUNDS = {"acosh": 4, "tan": 4, "pow": 4, "powr": 4}


def bound(device, name):
    return CUDA_BOUNDS.get(name, CUDA_BOUND) if device == "cuda" else SIMULATOR_BOUND


@pytest.fixture(scope="module")
def library():
    lines = ["#include <metal_stdlib>", "using namespace metal;"]
    lines += [
        f"kernel void {name}_k(device const float* x, device float* y, uint i [[thread_position_in_grid]])"
        f" {{ y[i] = precise::{name}(x[i]); }}\n"
        f"kernel void {name}_h(device const half4* x, device half4* y, uint i [[thread_position_in_grid]])"
        f" {{ y[i] = {name}(x[i]); }}"
        for name in UNARY
    ]
    lines += [
        f"kernel void {name}_k(device const float* x, device const float* z, device float* y,"
        f" uint i [[thread_position_in_grid]]) {{ y[i] = {name}(x[i], z[i]); }}"
        for name in BINARY
    ]
    return metalcore.compile_shader("\n".join(lines))


def floats(count, seed=0):
    """Floats of every exponent, numbers of ordinary size, and the special ones."""
    generator = np.random.default_rng(seed)
    patterns = generator.integers(0, 1 << 32, count // 2, dtype=np.uint32).view(np.float32)
    ordinary = generator.normal(size=count // 2).astype(np.float32) * np.float32(8)
    least, normal, most = np.float32(1e-45), np.float32(1.1754944e-38), np.float32(3.4028235e38)
    special = [
        0,
        1,
        0.5,
        1.5,
        2,
        3,
        127,
        128,
        8388607.5,
        8388609,
        16777216,
        88.72284,
        103.97,
        np.inf,
        np.nan,
        least,
        normal,
        most,
    ]
    special = np.array([*special, *np.negative(special)], np.float32)
    return np.concatenate([patterns, ordinary, special])


def errors_in_ulp(got, exact):
    """The distance of float32 results from float64 ones in units of the last place. It is infinite where only one is
    NaN or infinite."""
    with np.errstate(all="ignore"):
        wanted = exact.astype(np.float32)
        exponent = np.maximum(np.frexp(exact)[1], -125)
        error = np.abs(got.astype(np.float64) - exact) / np.ldexp(1.0, exponent - 24)
        same = (got == wanted) | (np.isnan(got) & np.isnan(wanted))
        special = ~np.isfinite(wanted) | ~np.isfinite(got)
        error = np.where(same, np.where(special, 0.0, error), np.where(special, np.inf, error))
        return np.where((wanted == 0) & (got == 0) & (np.signbit(wanted) != np.signbit(got)), np.inf, error)


def check(got, exact, inputs, bound):
    error = errors_in_ulp(got, exact)
    worst = int(np.argmax(error))
    shown = [values[worst] for values in inputs]
    assert error[worst] <= bound, f"at {shown}: {got[worst]!r} instead of {exact[worst]!r} ({error[worst]:.2f} ulp)"


@pytest.mark.parametrize("name", UNARY)
def test_unary(library, device, name):
    x = floats(200_000)
    if name in ("sinpi", "cospi"):  # above 2^23 all are whole; NumPy's own reduction is exact below
        x = x[np.abs(x) < 2**23]
    y = torch.empty(len(x), device=device)
    getattr(library, name + "_k")(torch.from_numpy(x).to(device), y)
    with np.errstate(all="ignore"):
        check(y.cpu().numpy(), UNARY[name](x.astype(np.float64)), [x], bound(device, name))


@pytest.mark.parametrize("name", UNARY)
def test_unary_half(library, device, name):
    """Results for every half, in vectors of four, are within half a unit of half's last place and float's own error."""
    x = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    y = torch.empty(len(x), dtype=torch.float16, device=device)
    getattr(library, name + "_h")(torch.from_numpy(x).to(device), y, threads=len(x) // 4)
    with np.errstate(all="ignore"):
        exact = UNARY[name](x.astype(np.float64))
        got, rounded = y.cpu().numpy(), exact.astype(np.float16)
        unit = np.ldexp(1.0, np.maximum(np.frexp(exact)[1], -13) - 11)
        close = np.abs(got.astype(np.float64) - exact) <= 0.501 * unit
    good = (got == rounded) | (np.isnan(got) & np.isnan(rounded)) | close
    assert good.all(), f"at {x[~good][:4]}: {got[~good][:4]} instead of {rounded[~good][:4]}"


@pytest.mark.parametrize("name", BINARY)
def test_binary(library, device, name):
    x, z = floats(200_000), floats(200_000, seed=1)
    np.random.default_rng(2).shuffle(z)
    special = x[-36:]
    x, z = np.concatenate([x, np.repeat(special, 36)]), np.concatenate([z, np.tile(special, 36)])
    if name == "powr":  # it is defined for x >= 0; its special cases are NaN where pow's are 1
        keep = (x > 0) & (x != 1) & np.isfinite(x) & (z != 0) & np.isfinite(z)
        x, z = x[keep], z[keep]
    y = torch.empty(len(x), device=device)
    getattr(library, name + "_k")(torch.from_numpy(x).to(device), torch.from_numpy(z).to(device), y)
    got = y.cpu().numpy()
    with np.errstate(all="ignore"):
        exact = BINARY[name](x.astype(np.float64), z.astype(np.float64))
        if name in ("fmin", "fmax", "fdim"):  # MSL leaves the sign of a zero open
            got, exact = got + 0.0, exact + 0.0
    check(got, exact, [x, z], bound(device, name))


def test_functions_with_a_second_result(device):
    library = metalcore.compile_shader("""
        #include <metal_stdlib>
        using namespace metal;
        kernel void split(device const float* x, device float* out, uint i [[thread_position_in_grid]]) {
          float whole, cosine;
          int exponent;
          out[8 * i] = modf(x[i], whole);
          out[8 * i + 1] = whole;
          out[8 * i + 2] = frexp(x[i], exponent);
          out[8 * i + 3] = exponent;
          out[8 * i + 4] = sincos(x[i], cosine);
          out[8 * i + 5] = cosine;
          out[8 * i + 6] = ldexp(x[i], 5);
          out[8 * i + 7] = fma(x[i], x[i], -x[i]);
        }""")
    x = np.array([1.75, -3.5, 0.0, 1e-40, 1e30, -0.3], np.float32)
    out = torch.empty(len(x), 8, device=device)
    library.split(torch.from_numpy(x).to(device), out, threads=len(x))
    got, wide = out.cpu().numpy(), x.astype(np.float64)
    fraction, whole = np.modf(x)
    mantissa, exponent = np.frexp(x)
    np.testing.assert_array_equal(got[:, 0], fraction)
    np.testing.assert_array_equal(got[:, 1], whole)
    np.testing.assert_array_equal(got[:, 2], mantissa)
    np.testing.assert_array_equal(got[:, 3], exponent)
    check(got[:, 4], np.sin(wide), [x], 2)
    check(got[:, 5], np.cos(wide), [x], 2)
    np.testing.assert_array_equal(got[:, 6], np.ldexp(x, 5))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got[:, 7], (wide * wide - wide).astype(np.float32))


def test_common_functions(device):
    library = metalcore.compile_shader("""
        #include <metal_stdlib>
        using namespace metal;
        kernel void common(device const float* x, device float* out, uint i [[thread_position_in_grid]]) {
          float v = x[i];
          half h = half(v);
          device float* o = out + 12 * i;
          o[0] = clamp(v, -1.0, 1.0);
          o[1] = mix(2.0f, 4.0f, v);
          o[2] = saturate(v);
          o[3] = sign(v);
          o[4] = smoothstep(-1.0f, 1.0f, v);
          o[5] = step(0.5f, v);
          o[6] = select(v, -v, v < 0);
          o[7] = median3(v, 0.0f, 1.0f);
          o[8] = max3(v, 0.0f, 1.0f) + min3(v, 0.0f, 1.0f);
          o[9] = clamp(h, 0.0f, 1.0f) + max(h, 0) + min(0.0f, h);
          o[10] = fract(v);
          o[11] = pow(half(2), 3.0f) + pow(2, 3);
        }""")
    x = np.array([-2.5, -1, -0.25, 0, 0.5, 0.75, 1, 3.25], np.float32)
    out = torch.empty(len(x), 12, device=device)
    library.common(torch.from_numpy(x).to(device), out, threads=len(x))
    t = np.clip((x + 1) / 2, 0, 1)
    clipped = np.clip(x, 0, 1)
    expected = [
        np.clip(x, -1, 1), 2 + 2 * x, clipped, np.sign(x), t * t * (3 - 2 * t), (x >= 0.5), np.abs(x), clipped,
        np.maximum(x, 1) + np.minimum(x, 0), clipped + np.maximum(x, 0) + np.minimum(x, 0), x - np.floor(x),
        np.full(8, 16),
    ]  # fmt: skip
    np.testing.assert_array_equal(out.cpu().numpy(), np.stack(expected, 1).astype(np.float32))
