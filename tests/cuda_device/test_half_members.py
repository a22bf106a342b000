"""Half members of unions, which hold the scales of quantized blocks, have the arithmetic of halves."""

import numpy
import torch

import metalcore


def test_half_members_of_unions_divide_as_halves():
    """A scale below 2^-10, divided by 16, is rounded to a denormal half."""
    library = metalcore.compile_shader("""#include <metal_stdlib>
    using namespace metal;
    struct Scales { union { struct { half scale; half offset; }; half2 both; }; uchar code; uchar unused; };
    kernel void decode(device const Scales* b, device float* y, uint i [[thread_position_in_grid]]) {
      const float scale = i & 1 ? b[i].scale / 16.h : b[i].scale;
      y[i] = scale * float(b[i].code) - float(b[i].scale * b[i].offset);
    }""")
    generator = numpy.random.default_rng(2)
    blocks = numpy.zeros(
        512, dtype=[("scale", "<f2"), ("offset", "<f2"), ("code", "u1"), ("unused", "u1"), ("padding", "u2")]
    )  # half2 is aligned to 4
    blocks["scale"] = 10 ** generator.uniform(-4.5, -1, 512)
    blocks["offset"], blocks["code"] = generator.uniform(0, 1, 512), generator.integers(0, 256, 512)
    y = torch.zeros(512, device="cuda")
    library.decode(torch.from_numpy(blocks.view(numpy.uint8)).cuda(), y, threads=512)
    scale = numpy.where(numpy.arange(512) & 1, blocks["scale"] / numpy.float16(16), blocks["scale"])
    assert scale.dtype == numpy.float16
    expected = scale.astype(numpy.float32) * blocks["code"] - (blocks["scale"] * blocks["offset"]).astype(numpy.float32)
    numpy.testing.assert_allclose(y.cpu().numpy(), expected, rtol=1e-6, atol=1e-8)
