"""Numbers that are rounded to 16 bits four at once, and the functions that are precise enough for 16 bits."""

import pytest
import torch
import torch.nn.functional as F
from traced import built, distances, placed, results

from metalcore._core import generated_kernels
from metalcore.programs.pointwise import blocks
from metalcore.programs.pointwise.stages import Rounding, Stored, can_be_staged, staged
from metalcore.recording import record

SIXTEEN_BITS = (torch.bfloat16, torch.float16)
# What the functions' own errors add to half a unit in the last place.
NEAREST = 0.53
FUNCTIONS = {
    "gelu": (F.gelu, lambda x: x * torch.special.erfc(x * -(0.5**0.5)) / 2),
    "gelu_tanh": (
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: x * torch.sigmoid((8 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)),
    ),
    "tanh": (torch.tanh, torch.tanh),
    "sigmoid": (torch.sigmoid, torch.sigmoid),
}


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_all_numbers_of_16_bits(device, name, dtype):
    function, exact = FUNCTIONS[name]
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    (made,) = built(function, x)(x.to(device))
    expected = exact(x.double())
    is_zero = expected.abs() < 32 * torch.finfo(torch.float32).tiny  # as fast functions have it
    off = ~is_zero & (distances(made, expected) > NEAREST)
    assert not off.any(), (x[off][:8], made.cpu()[off][:8], expected[off][:8])


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize("shape", [(3, 67, 24), (2, 64, 16), (1, 1, 8), (3, 67, 23)])
def test_rows(device, monkeypatch, dtype, shape):
    """A thread takes four rows of one operand and two of two operands, if others are the same for all rows, and twice
    as many where rows are no multiples of a vector."""
    monkeypatch.setattr(blocks, "LEAST_THREADS", 1)
    torch.manual_seed(0)
    x, a, c = ((torch.randn(size) * 4).to(dtype).to(device) for size in (shape, shape[2:], (shape[1], 1)))

    def check(function, rows, *tensors):
        (made,), recording = record(built(function, *tensors), *tensors)
        assert torch.equal(made.cpu(), function(*[tensor.cpu() for tensor in tensors]))
        (plan,) = recording.plans
        vector = f"1 in {rows * 2}" if shape[2] % 8 else f"8 in {rows}"
        assert shape[1] == 1 or f"{vector} rows a thread" in plan.why

    check(lambda x, a: (x * a + 1.25) * a - x, 4, x, a)
    check(lambda x, a, c: x * a + c, 4, x, a, c)
    check(lambda x, y, a: (x - y) * a, 2, x, x * 3, a)


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_results_of_several_dtypes(device, dtype):
    """Registers that a later stage reads are kept, whatever their type; those that nothing needs are not computed."""
    torch.manual_seed(0)
    x, y, i = torch.randn(1003).to(dtype), torch.randn(1003).to(dtype), torch.randint(-9, 9, (1003,))

    def function(x, y, i):
        total, is_larger = x * 3 + y, x > y
        chosen = torch.where(is_larger & (total > 0), total * y, x - i)
        return (
            total,
            chosen,
            is_larger,
            total.float() + 1,
            chosen > total,
            (x * y).clamp(-1, 1),
            x.to(torch.int32) + i,
            x,
        )

    for made, expected in results(function, *(placed(tensor, device) for tensor in (x, y, i))):
        assert made.dtype == expected.dtype and torch.equal(made.cpu(), expected)


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_sums_and_products_have_the_bits_of_float32_rounded(device, dtype):
    """Of any numbers, with infinite ones, NaN, zeros of both signs, and those below the least normal one. Products of
    bfloat below float32's own least normal number may round twice."""
    torch.manual_seed(0)
    x, y = (torch.randint(-(1 << 15), 1 << 15, (1 << 18,), dtype=torch.int32).to(torch.int16).view(dtype) for _ in "xy")

    def function(x, y):
        return x + y, x - y, x * y, (x + y) * y - x, y * 1.5 + 0.125

    for made, expected in results(function, x.to(device), y.to(device)):
        made = made.cpu()
        same = (made.view(torch.int16) == expected.view(torch.int16)) | (made.isnan() & expected.isnan())
        may_round_twice = (dtype == torch.bfloat16) & (expected.float().abs() < torch.finfo(torch.float32).tiny)
        assert (same | (may_round_twice & (distances(made, expected.double()) <= 1))).all()


@pytest.mark.parametrize("dtype, type_", [(torch.bfloat16, "bfloat"), (torch.float16, "half")])
def test_kernels_convert_nothing_for_sums_and_products(device, dtype, type_):
    x, a = (torch.randn(shape, dtype=dtype, device=device) for shape in ((16, 64), (64,)))
    _, recording = record(built(lambda x, a: (x * a + 1.5) * x - a, x, a), x, a)
    text = generated_kernels.source(recording.kernels[0])
    assert f" * as_type<vec<{type_}, 4>>" in text and "float(as_type" not in text


def test_stages():
    statements = [
        "const float v1 = a * b;",
        "const float v2 = r(v1);",
        "const float v3 = v2 + 1;",
        "const float v4 = v1;",
    ]
    made = "\n".join(staged(statements, {"v2": Rounding("v1", "half")}, [Stored("out.part[part]", "half", "v3", "")]))
    assert "v1s[k] = a * b;" in made and "v2s = float4(vec<half, 4>(v1s));" in made
    assert "v3s[k] = v2s[k] + 1;" in made and "out.part[part] = vec<half, 4>(v3s);" in made and "v4" not in made
    assert can_be_staged(statements) and not can_be_staged(["if (a) {", "}"])


def test_pairs():
    """Operands of the result's type are taken as they are; others, and formulas of more, are computed in float."""
    of, other = (f"as_type<vec<{type_}, 4>>(x_values[r].words[j / 4])[j % 4]" for type_ in ("half", "bfloat"))
    statements = [
        f"const float v1 = float({of}) * 1.5f;",
        "const float v2 = r(v1);",
        f"const float v3 = v2 + float({of});",
        "const float v4 = r(v3);",
        f"const float v5 = v4 - float({other});",
        "const float v6 = r(v5);",
        "const float v7 = v6 * 0.1f;",
        "const float v8 = r(v7);",
        "const float v9 = v8 - v4;",
    ]
    roundings = {f"v{i + 1}": Rounding(f"v{i}", "half") for i in (1, 3, 5, 7)}
    made = "\n".join(staged(statements, roundings, [Stored("out.part[part]", "half", "v9", "")], rows=2))
    vector = "as_type<vec<half, 4>>(x_values[r].words[part])"
    assert f"v2_halfs[r] = {vector} * vec<half, 4>(half(1.5f));" in made and "v1" not in made and "v2s" not in made
    assert f"v4_halfs[r] = v2_halfs[r] + {vector};" in made and "v4s[r] = float4(v4_halfs[r]);" in made
    assert f"v5s[r][k] = v4s[r][k] - float({other});" in made and "v7s[r][k] = v6s[r][k] * 0.1f;" in made
    assert "v8_halfs[r] = vec<half, 4>(v7s[r]);" in made and "v3" not in made and "v9s" not in made
    assert "out.part[part] = v8_halfs[r] - v4_halfs[r];" in made
