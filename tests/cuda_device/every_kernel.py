"""Runs every built-in kernel at least once, on small tensors, while a tool watches (tools/cuda_check.py).

    python tests/cuda_device/every_kernel.py                                # all sections, each with its digest
    python tests/cuda_device/every_kernel.py --section qr --launched FILE   # one, and its kernels' names as JSON
    python tests/cuda_device/every_kernel.py --fault memcheck               # only a fault for the sanitizer to find
    python tests/cuda_device/every_kernel.py --device meta                  # all sections are planned, and none runs

A section's digest is the same on every run. The program fails if all sections together leave out a built-in kernel.
"""

import argparse
import functools
import hashlib
import itertools
import json
import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

import torch  # noqa: E402
from linalg_sections import LINALG  # noqa: E402
from rows import FAMILIES, lengths, tuned  # noqa: E402
from section_inputs import measured, random, with_gradients  # noqa: E402

import metalcore  # noqa: E402
from metalcore._core.accuracy import evaluate  # noqa: E402
from metalcore._core.registry import OPS  # noqa: E402
from metalcore.loss._cross_entropy_operators import cross_entropy_ahead  # noqa: E402
from metalcore.quant._affine import affine_sample  # noqa: E402
from metalcore.quant._four_bits import four_bits_sample  # noqa: E402
from metalcore.quant._pack import MADE  # noqa: E402
from metalcore.quant._scaled_weight import FORMATS, scaled_sample  # noqa: E402
from metalcore.quant._types import KERNELS, packed_sample  # noqa: E402
from metalcore.recording import on_meta, record  # noqa: E402

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def samples(device, dtype):
    """The results and gradients of every op's samples."""
    for op in OPS.values():
        for sample in op.samples() if dtype in op.dtypes else ():
            for tensors in evaluate(op, sample, sample.make(device, dtype)).values():
                yield from ((f"{op.name}, {sample.name}", tensor) for tensor in tensors)


def row_shapes(op, dtype):
    """Shapes whose plan takes a kernel that no plan before took, yielded while that plan's tuning is on. A shape whose
    rows can be read 16 bytes at a time follows each. The last three shapes have rows that several threadgroups share,
    or that registers hold where there are many."""
    taken = set()
    for family in FAMILIES:
        with tuned(family):
            for shape in (*((9, length) for length in lengths(op, dtype)), (2, 32769), (133, 16385), (400, 8208)):
                weight = [shape[1:]] * op.endswith("rms_norm")
                plans = [metalcore.explain(op, shape, *weight, dtype=dtype, backward=way) for way in (False, True)]
                kernels = {kernel for plan in plans for kernel in plan.kernels}
                if not kernels <= taken:
                    taken |= kernels
                    yield shape
                    yield shape[0], shape[1] + 16 - shape[1] % 16


def softmax(device, dtype):
    for op in (metalcore.softmax, metalcore.log_softmax):
        types = (None,) if dtype == torch.float32 else (None, torch.float32)
        for to in types:
            for rows, length in row_shapes(op.__name__, dtype):
                x = random(device, dtype, rows, length)
                yield from with_gradients(f"{op.__name__} {length}", lambda x: op(x, -1, to), x)
            for inner in (3, 40):
                x = random(device, dtype, 5, 7, inner)
                yield from with_gradients(f"{op.__name__} columns", lambda x: op(x, 1, to), x)


def rms_norm(device, dtype):
    for rows, length in row_shapes("rms_norm", dtype):
        shape = [random(device, dtype, rows, length) for _ in "xr"]
        yield from with_gradients(f"rms_norm {length}", lambda x: metalcore.rms_norm(x, (length,)), shape[0])
        for weight_dtype in dict.fromkeys((dtype, torch.float32)):
            weight = random(device, weight_dtype, length)
            yield from with_gradients(f"add_rms_norm {length}", metalcore.add_rms_norm, *shape, weight)


def rms_norm_gated(device, dtype):
    """Each variant, aligned and not, with each dtype of the weight."""
    for length in (64, 77, 256, 5120, 8200):
        x, gate = (random(device, dtype, 3, length) for _ in "xg")
        for weight_dtype in dict.fromkeys((dtype, torch.float32)):
            weight = random(device, weight_dtype, length)
            yield from with_gradients(f"rms_norm_gated {length}", metalcore.rms_norm_gated, x, gate, weight)


def embedding(device, dtype):
    """Few indices of long rows."""
    indices = torch.arange(400, device=device) % 7
    yield from with_gradients(
        "embedding", lambda table: metalcore.embedding(indices, table), random(device, dtype, 7, 4096)
    )


def optimizers(device, dtype):
    """Every dtype that states may have, and stochastic rounding."""
    kinds = [{"state_dtype": state_dtype} for state_dtype in (None, torch.bfloat16)]
    kinds += [{**kind, "stochastic_rounding": 1} for kind in ({}, *kinds) if dtype is torch.bfloat16]
    for name in ("adamw", "lion"):
        op = OPS[name]
        for sample, kind in itertools.product(op.samples(), kinds):
            if name == "adamw" or "stochastic_rounding" not in kind:
                options = {**sample.options, **kind}
                for tensor in op.call(op.function, *sample.make(device, dtype), **options):
                    yield f"{name}, {sample.name}", tensor


def pages(device, dtype):
    """Decoding with heads of every size that there is a kernel for, wide and narrow, and heads to share keys of every
    number of rows."""
    numbers = [torch.tensor(values, device=device) for values in ([0, 2, 3], [4, 1, 2], [3, 4])]
    sizes, families = ((64, 64), (128, 64), (256, 64), (576, 64), (576, 512)), ("baseline", "apple7")
    for (size, value_size), heads, family in itertools.product(sizes, (1, 4, 8, 12, 24), families):
        cache = random(device, dtype, 5, 4, 1, size), random(device, dtype, 5, 4, 1, value_size)
        q = random(device, dtype, 2, heads, size)
        with tuned(family):
            yield f"pages {family} {size} {heads}", metalcore.paged.batch_decode(q, cache, *numbers)
            # No product of matrices has a cap.
            yield f"pages {family} {size} {heads}, cap", metalcore.paged.batch_decode(q, cache, *numbers, softcap=3.0)
    # Requests that fill 132 cores have kernels whose lanes load operands.
    for batch in (132, 264):
        q, k, v = (random(device, dtype, batch, heads, length, 64) for heads, length in ((8, 1), (1, 256), (1, 256)))
        with tuned("hopper"):
            yield f"decode of {batch} requests", metalcore.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def attention(device, dtype):
    """Wide and narrow kernels and those for units, for heads of every size, with and without a soft cap, which general
    kernels know. Units make gradients of calls with masks, and not of those with soft caps."""
    families, sizes = ("baseline", "apple7", "hopper"), (64, 96, 128, 192, 256)
    mask = torch.ones(9, 9, dtype=torch.bool, device=device)
    cases = [
        (family, size, {"is_causal": True, "softcap": cap})
        for family in families
        for size in sizes
        for cap in (0.0, 2.0)
    ]
    cases += [("hopper", size, {"attn_mask": mask}) for size in (64, 128)]
    for family, size, options in cases:
        with tuned(family):
            tensors = [random(device, dtype, 1, 2, 9, size) for _ in "qkv"]
            run = functools.partial(metalcore.scaled_dot_product_attention, **options)
            yield from with_gradients(f"attention {family} {size} {', '.join(options)}", run, *tensors)


def conv1d(device, dtype):
    """Whole sequences in both layouts, which kernels of vectors take, and a step of states of both lengths."""
    for positions_first, (shape, activation) in itertools.product(
        (False, True), (((2, 64, 64), None), ((1, 40, 520), "silu"))
    ):
        x, grad = (random(device, dtype, *shape) for _ in "xg")
        x, grad = (x.mT, grad.mT) if positions_first else (x, grad)
        x, weight = x.requires_grad_(), random(device, dtype, x.shape[1], 4).requires_grad_()
        y = metalcore.causal_conv1d(x, weight, None, activation=activation)
        for tensor in (y, *torch.autograd.grad(y, (x, weight), grad)):
            yield "causal_conv1d", tensor.detach()
    weight = random(device, dtype, 64, 4)
    for kept in (3, 4):
        state = random(device, dtype, 2, 64, kept)
        yield (
            "causal_conv1d_update",
            metalcore.causal_conv1d_update(random(device, dtype, 2, 64), state, weight),
        )


def layer_norm(device, dtype):
    for rows, length in row_shapes("layer_norm", dtype):
        tensors = [random(device, dtype, *shape) for shape in ((rows, length), (rows, length), (length,), (length,))]
        yield from with_gradients(f"add_layer_norm {length}", metalcore.add_layer_norm, *tensors)


def group_norm(device, dtype):
    """Groups that a thread takes and groups of a threadgroup, of channels that are whole vectors and not."""
    for family in ("baseline", "simulator"):
        with tuned(family):
            for sides in ((8, 8), (5, 7)):
                x, weight, bias = (random(device, dtype, *shape) for shape in ((3, 12, *sides), (12,), (12,)))
                yield from with_gradients(
                    f"group_norm {sides}", lambda x, w, b: metalcore.group_norm(x, 4, w, b), x, weight, bias
                )


def gemm(device, dtype):
    """Enough tiles for large ones, the short steps of Apple GPUs, and units that multiply tensors."""
    a, b = random(device, dtype, 1500, 40), random(device, dtype, 40, 1512)
    with tuned("apple7"):
        yield "matmul, short steps", metalcore.matmul(a[:70], b[:, :100])
    with tuned("simulator"):
        yield "matmul, large tiles", metalcore.matmul(a, b)
        yield "matmul, large tiles, transposed", metalcore.matmul(b.T, a.T)
    with tuned("hopper"):
        sizes = ((72 * 128, 200, 136), (136 * 128, 100, 136), (2560, 200, 2100), (300, 40, 2100))
        sizes += tuple((70 * 128, columns, 136) for columns in (12, 20, 40))
        sizes += ((1100, 200, 136), (70, 80, 40), (70, 40, 40))  # few tiles, few terms
        sizes += ((200 * 64, 200, 40),)  # tiles along which threadgroups walk
        for terms in (40, 100):
            b = random(device, dtype, 140, terms, 200)
            for a in (random(device, dtype, 70, terms), random(device, dtype, terms, 70).T):
                for name, right in (("rows", b), ("columns", b.mT.contiguous().mT)):
                    yield f"matmul, units, a batch of {terms} terms, {name}", metalcore.matmul(a, right)
        for rows, columns, terms in sizes:
            b = random(device, dtype, terms, columns)
            for a in (random(device, dtype, rows, terms), random(device, dtype, terms, rows).T):
                for name, right in (("rows", b), ("columns", b.T.contiguous().T)):
                    yield f"matmul, units, {columns} columns, {name}", metalcore.matmul(a, right)


def conv2d(device, dtype):
    """Tiles of units that multiply tensors."""
    x = random(device, dtype, 1, 16, 136, 136).contiguous(memory_format=torch.channels_last)
    with tuned("hopper"):
        for channels in (40, 100):
            weight = random(device, dtype, channels, 16, 3, 3)
            yield f"conv2d, units, {channels} channels", metalcore.conv2d(x, weight)
        yield "conv2d, units, contiguous", metalcore.conv2d(x.contiguous(), weight)
        less = x[..., :100].contiguous(memory_format=torch.channels_last)
        yield "conv2d, units, fewer tiles", metalcore.conv2d(less, weight)
        yield "conv2d, units, few channels", metalcore.conv2d(x[:, :3], weight[:, :3])
        for channels in (96, 344):
            x = random(device, dtype, 1, channels, 5, 5).contiguous(memory_format=torch.channels_last)
            weight = random(device, dtype, 24, channels, 3, 3)
            yield f"conv2d, units, shared terms of {channels} channels", metalcore.conv2d(x, weight)


def rope(device, dtype):
    """Tables of float32 for q and k of 16 bits, and for heads that are whole vectors or not."""
    for size in (32, 6):
        q, k, angles = random(device, dtype, 2, 4, 5, size), random(device, dtype, 2, 1, 5, size), torch.rand(5, size)
        cos, sin = angles.cos().to(device), angles.sin().to(device)
        yield from with_gradients(f"rope {size}", lambda q, k: metalcore.rope(q, k, cos, sin), q, k)


def loss(device, dtype):
    """Losses of rows that threadgroups walk, and of rows that threads do, to which the simulator's plans give them."""
    for family in ("baseline", "simulator"):
        with tuned(family):
            for length in (40, 1027):
                x, target = random(device, dtype, 5, length), torch.arange(5, device=device)
                for inplace in (False, True):
                    yield from with_gradients(
                        f"cross_entropy {length}", lambda x: metalcore.cross_entropy(x * 1, target, inplace=inplace), x
                    )
                for divided in (False, True):
                    options = None, 1, -100, 0.0, divided
                    yield from with_gradients(
                        f"cross_entropy ahead {length}", lambda x: cross_entropy_ahead(x, target, *options)[0], x
                    )
                yield from with_gradients(f"jsd {length}", lambda x: metalcore.jsd(x, x.detach().flip(0)), x)
            states, teacher = ([random(device, dtype, rows, 8) for rows in (5, 40)] for _ in range(2))
            yield from with_gradients(
                "fused_linear_jsd", lambda x, w: metalcore.fused_linear_jsd(x, w, *teacher), *states
            )


def state_updates(device, dtype):
    """States of float32 and of the inputs' dtype, whose states have a rate each or share one."""
    for states, kind, shared in itertools.product((6, 16, 64, 128), {torch.float32, dtype}, (False, True)):
        state, A = random(device, kind, 2, 3, 5, states), random(device, torch.float32, 3, 5, 1 if shared else states)
        x, dt = (random(device, dtype, 2, 3, 5) for _ in range(2))
        B, C = (random(device, dtype, 2, 1, states) for _ in range(2))
        rates = (-A.abs()).expand(3, 5, states)
        y = metalcore.selective_state_update(state, x, dt, rates, B, C, dt_softplus=True)
        name = f"selective_state_update, {states} states of {kind}{', one rate' if shared else ''}"
        yield from ((name, tensor) for tensor in (y, state))


def delta_walks(device, dtype):
    """Where there are few threadgroups for a GPU, they walk along chunks with fewer columns each. Units multiply the
    bfloats of heads of 128."""
    for family, size in (("hopper", 8), ("hopper", 128), ("simulator", 8)):
        with tuned(family):
            q, k, v = (random(device, dtype, 1, 70, heads, size) for heads in (1, 1, 2))
            g, beta = (random(device, torch.float32, 1, 70, 2).sigmoid() for _ in range(2))
            yield from with_gradients(
                f"delta walks, {family}, {size}",
                lambda q, k, v, g, beta: metalcore.chunk_gated_delta_rule(q, k, v, -g, beta.to(v.dtype))[0],
                *(q, k, v, g, beta),
            )


def delta_steps(device, dtype):
    """One position of heads of each size that there is a kernel for, and of one whose values are no whole vectors."""
    for keys, values in ((40, 36), (100, 40), (200, 24), (40, 7)):
        q, k, v = (random(device, dtype, 2, 1, *shape) for shape in ((1, keys), (1, keys), (2, values)))
        g, beta = (random(device, torch.float32, 2, 1, 2).sigmoid() for _ in range(2))
        state = random(device, torch.float32, 2, 2, keys, values)
        found = metalcore.fused_recurrent_gated_delta_rule(q, k, v, -g, beta, None, state, True)
        yield from ((f"delta step, {keys} by {values}", tensor) for tensor in found)


def linear_scans(device, dtype):
    """One walk along many chunks is divided into segments; heads of 64 values fill a tile, and others do not."""
    for length, heads, values, keys in ((520, 1, 8, 32), (130, 3, 64, 128)):
        q, k = (random(device, dtype, 1, length, 1, keys) for _ in "qk")
        v, skip = random(device, dtype, 1, length, heads, values), random(device, torch.float32, heads, values)
        g, weights = (random(device, torch.float32, 1, length, heads).sigmoid() for _ in range(2))
        yield from with_gradients(
            f"linear scans of {length}",
            lambda q, k, v, g, weights, skip: metalcore.mamba_chunk_scan_combined(v, weights, -g[0, 0], k, q, 64, skip),
            *(q, k, v, g, weights, skip),
        )


TILES = tuple(itertools.product((8, 16), (torch.float16, torch.bfloat16)))  # rows of x, and their dtype


def quant(device):
    """Every type of packed weights: as numbers, times one and several rows of x, and made of numbers."""
    for type in sorted(KERNELS):
        packed = packed_sample(type, 6, 512, device=device)
        yield f"dequantize {type}", metalcore.dequantize(packed, type)
        for family, rows in (("baseline", 1), ("baseline", 3), ("apple7", 3)):
            x = random(device, torch.float32, rows, 512)
            with tuned(family):
                yield f"quantized_linear {type}", metalcore.quantized_linear(x, packed, type)
        for dtype in (torch.float16, torch.bfloat16):
            with measured(device, ("quant", "unit_rows", [1])):
                x = random(device, dtype, 9, 512)
                yield f"quantized_linear {type}, units", metalcore.quantized_linear(x, packed, type)
    for type, nested in itertools.product(("nf4", "fp4"), (False, True)):
        packed, state = four_bits_sample(type, 6, 512, device, nested=nested)
        for family, rows in (("baseline", 1), ("baseline", 3), ("apple7", 3)):
            with tuned(family):
                x = random(device, torch.float32, rows, 512)
                yield f"linear_4bit {type}", metalcore.linear_4bit(x, packed, state)
        for rows, dtype in TILES:
            with tuned("hopper"):
                yield f"linear_4bit {type}", metalcore.linear_4bit(random(device, dtype, rows, 512), packed, state)
    for bits in (2, 3, 4, 5, 6, 8):
        weights = *affine_sample(bits, 6, 512, device), bits
        yield f"dequantize_affine {bits}", metalcore.dequantize_affine(*weights)
        for family, rows in (("baseline", 1), ("baseline", 3), ("apple7", 3)):
            with tuned(family):
                x = random(device, torch.float32, rows, 512)
                yield f"affine_linear {bits}", metalcore.affine_linear(x, *weights)
        matrices = [each.view(2, 3, -1) for each in weights[:3]]
        chosen = torch.tensor([[1, 0]], device=device)
        experts = metalcore.affine_linear_experts(random(device, torch.float32, 1, 512), *matrices, bits, chosen)
        yield f"affine_linear_experts {bits}", experts
    for format in FORMATS:
        x = random(device, torch.float32, 3, 512)
        made = metalcore.quantize_scaled(x, format)
        yield f"quantize_scaled {format}", made.packed
        yield f"dequantize_scaled {format}", metalcore.dequantize_scaled(made)
        weight = scaled_sample(format, 6, 512, device)
        for family, rows in (("baseline", 1), ("baseline", 3), ("apple7", 3)):
            with tuned(family):
                yield f"scaled_linear {format}", metalcore.scaled_linear(x[:rows], weight)
        for rows, dtype in TILES:
            with tuned("hopper"):
                yield f"scaled_linear {format}", metalcore.scaled_linear(random(device, dtype, rows, 512), weight)
    for type in sorted(MADE):
        yield f"quantize {type}", metalcore.quant.quantize(random(device, torch.float32, 2, 512), type)


# name -> device -> [(what, result)]
SECTIONS = {
    f"{section.__name__}-{str(dtype).removeprefix('torch.')}": functools.partial(section, dtype=dtype)
    for section in (
        samples,
        softmax,
        rms_norm,
        rms_norm_gated,
        layer_norm,
        group_norm,
        gemm,
        conv2d,
        rope,
        loss,
        embedding,
        attention,
        conv1d,
        pages,
        optimizers,
        state_updates,
        delta_walks,
        delta_steps,
        linear_scans,
    )
    for dtype in DTYPES
} | {section.__name__: section for section in (*LINALG, quant)}


def watched(results, launched):
    """Yields the results, and adds the names of the kernels that they submit to the set `launched`."""
    results = iter(results)
    while True:
        result, recording = record(next, results, None)
        launched.update(recording.kernels)
        if result is None:
            return
        yield result


def planned(results):
    """The names of the kernels that results of meta tensors stand for."""
    with on_meta("mps") as recorder:
        for _ in results:
            pass
    return recorder.recording.kernels


def built_in():
    """All kernels, except the one that the Metal backend alone runs, to ask a GPU (tests/metal_runtime)."""
    from metalcore.msl.nvidia import cuda

    return {kernel for _, kernels in cuda.builtin_programs().values() for kernel in kernels} - {"half_subnormals"}


FAULTS = {
    "memcheck": "kernel void fault(device float* x, uint i [[thread_position_in_grid]]) { x[i + 128] = 1; }",
    "racecheck": """kernel void fault(device float* x, uint i [[thread_position_in_threadgroup]]) {
        threadgroup float shared[64];
        shared[i] = x[i];
        x[i] = shared[63 - i];
    }""",
    "synccheck": """kernel void fault(device float* x, uint i [[thread_position_in_threadgroup]]) {
        if (i % 2) threadgroup_barrier(metal::mem_flags::mem_threadgroup);
        x[i] = 1;
    }""",
}


def run_fault(device, tool):
    x = torch.empty(128, device=device)
    metalcore.compile_shader("#include <metal_stdlib>\n" + FAULTS[tool]).fault(x, threads=64, group_size=64)
    torch.cuda.synchronize()


def digest(results):
    torch.manual_seed(0)
    found, count = hashlib.sha256(), 0
    for what, tensor in results:
        assert tensor.isfinite().all(), f"{what}: a value is not finite"
        found.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        count += 1
    return f"{found.hexdigest()[:16]} ({count} results)"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--section", choices=SECTIONS)
    parser.add_argument("--launched", type=Path)
    parser.add_argument("--fault", choices=FAULTS)
    arguments = parser.parse_args()
    if arguments.fault:
        return run_fault(arguments.device, arguments.fault)
    if arguments.device == "mps":
        import metalcore.simulator  # noqa: F401
    torch.autograd.set_multithreading_enabled(False)  # recordings leave out what other threads submit
    launched = set()
    for name in [arguments.section] if arguments.section else SECTIONS:
        results = SECTIONS[name](arguments.device)
        if arguments.device == "meta":
            launched.update(planned(results))
        else:
            print(name, digest(watched(results, launched)), flush=True)
    if arguments.launched:
        arguments.launched.write_text(json.dumps(sorted(launched)))
    if arguments.section:
        return 0
    missing = sorted(built_in() - launched)
    print(f"launched {len(launched)} of {len(built_in())} built-in kernels", *missing, sep="\n  not launched: ")
    return 1 if missing else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status or 0)  # an orderly end may abort in a thread that PyTorch's autograd is still starting
