"""Few queries and many keys where many rows of 16-bit numbers share keys: products of matrices. Kernels of 16 and 32
rows round weights. In those of 8 rows weights have two numbers of 16 bits each, and in narrow kernels they are floats,
so that the bounds are those of the kernels that multiply in float32."""

import pytest
import torch
from references import assert_attention_near, rounds_weights, tensor, wide
from rows import tuned
from test_decode import SUFFIXES, inputs, kernels, reference

import metalcore
from metalcore import scaled_dot_product_attention as attend
from metalcore.recording import on_meta, record

DTYPES = [torch.float16, torch.bfloat16]
FAMILIES = ["baseline", "simulator", "hopper", "apple7"]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def attended(tensors, **options):
    return attend(*tensors, enable_gqa=True, return_lse=True, **options)


def check(expected, *tensors, **options):
    """Checks attention by the bounds of the kernel that it takes."""
    found, made = record(attend, *tensors, enable_gqa=True, return_lse=True, **options)
    assert_attention_near(found, expected, tensors[2], rounds_weights(made.kernels[0]))


def shares(tensors):
    """How many threadgroups share the keys of the only head."""
    return record(attend, *tensors, enable_gqa=True)[1].dispatches[0].grid[1]


def first_kernel(tensors, family="baseline", **options):
    with tuned(family):
        return kernels(*tensors, **options)[0].removeprefix("attention_decode_")


@each_dtype
@pytest.mark.parametrize(
    "heads, kv_heads, queries, kernel",
    [
        (1, 1, 1, "64x1"),
        (2, 1, 1, "64x4"),
        (4, 1, 1, "64x4"),
        (5, 1, 1, "matrices_64x8"),
        (16, 2, 1, "matrices_64x8"),
        (9, 1, 1, "matrices_64x16"),
        (6, 2, 3, "matrices_64x16"),
        (16, 1, 1, "matrices_64x16"),
        (4, 2, 8, "matrices_64x16"),
        (17, 1, 1, "matrices_64x32"),
        (8, 2, 8, "matrices_64x32"),
        (31, 1, 1, "matrices_64x32"),
    ],
)
def test_rows(device, dtype, heads, kv_heads, queries, kernel):
    """Tiles that are full and not, which the causal limit cuts one by one."""
    tensors = inputs(device, dtype, heads, kv_heads, queries, keys=269)
    assert first_kernel(tensors) == f"{kernel}_{SUFFIXES[dtype]}"
    narrow = "matrices_narrow_64x16" if "matrices" in kernel else f"narrow_{kernel}"
    assert first_kernel(tensors, "apple7") == f"{narrow}_{SUFFIXES[dtype]}"
    hopper = "matrices_64x8" if kernel == "64x4" else kernel
    assert first_kernel(tensors, "hopper") == f"{hopper}_{SUFFIXES[dtype]}"
    for family in FAMILIES:
        with tuned(family):
            check(reference(*tensors), *tensors)
            check(reference(*tensors, high=0), *tensors, is_causal=True, lower_right=True)


@each_dtype
@pytest.mark.parametrize(
    "size, value_size, kernel",
    [(64, 64, 64), (40, 8, 64), (64, 72, 128), (72, 64, 128), (8, 128, 128), (128, 128, 128), (128, 136, 256),
     (136, 64, 256), (192, 128, 256), (256, 256, 256), (264, 8, None)],
)  # fmt: skip
def test_sizes(device, dtype, size, value_size, kernel):
    tensors = inputs(device, dtype, heads=12, kv_heads=1, size=size, value_size=value_size, batch=1)
    assert first_kernel(tensors).startswith(f"matrices_{kernel}x16" if kernel else "576x8")
    expected = reference(*tensors)
    check(expected, *tensors)
    narrow = {64: "matrices_narrow_64x16", 128: "matrices_narrow_128x8", 256: "narrow_256x4", None: "narrow_576x4"}
    assert first_kernel(tensors, "apple7").startswith(narrow[kernel])
    with tuned("apple7"):
        check(expected, *tensors)


@pytest.mark.parametrize(
    "keys, heads, threadgroups", [(1023, 32, "1×32×8"), (1024, 32, "1×96×8"), (1024, 128, "1×64×8")]
)
def test_long_ways_are_shared_though_tiles_fill_the_gpu(keys, heads, threadgroups):
    """Kernels that multiply matrices all run at once, and do not take turns."""
    with tuned("hopper"):
        shapes = (8, heads, 1, 128), (8, 32, keys, 128), (8, 32, keys, 128)
        plan = metalcore.explain("scaled_dot_product_attention", *shapes, dtype=torch.bfloat16, enable_gqa=True)
    kernel = "128x1" if heads == 32 else "matrices_128x8"
    assert f"attention_decode_{kernel}_bfloat: {threadgroups} threadgroups" in str(plan)


@pytest.mark.parametrize("batch, keys, splits", [(5, 512, 3), (6, 512, 1), (8, 512, 1), (9, 512, 1)])
def test_two_threadgroups_do_not_share_a_short_row(batch, keys, splits):
    """528 of them fill the GPU, and 6 or 8 requests of 32 heads leave two to each of theirs."""
    with tuned("hopper"):
        shapes = (batch, 32, 1, 64), (batch, 32, keys, 64), (batch, 32, keys, 64)
        plan = metalcore.explain("scaled_dot_product_attention", *shapes, dtype=torch.bfloat16)
    assert plan.steps[0].grid == (1, 32 * splits, batch)


@pytest.mark.parametrize(
    "batch, heads, keys, splits",
    [(24, 16, 2816, 22), (24, 16, 3000, 16), (1, 16, 4096, 64), (1, 16, 8192, 64), (2, 8, 8192, 128)],
)
def test_threadgroups_have_whole_steps(batch, heads, keys, splits):
    """22 threadgroups for each of 24 tiles fill the GPU. Of 2816 keys each has two steps of 64, and of 3000 keys three,
    which 16 of them need as well. One tile has two steps of 16 rows rather than more than 64 results to merge."""
    with tuned("hopper"):
        shapes = (batch, heads, 1, 128), (batch, 1, keys, 128), (batch, 1, keys, 128)
        plan = metalcore.explain("scaled_dot_product_attention", *shapes, dtype=torch.bfloat16, enable_gqa=True)
    assert plan.steps[0].grid == (1, splits, batch)


@pytest.mark.only_on("simulator")  # others may have no second step
@pytest.mark.parametrize("batch, grid", [(6, (32, 6, 1)), (7, (16, 7, 1))])
def test_a_threadgroup_merges_results_of_several_heads(batch, grid):
    """As long as three quarters of the 132 cores have one."""
    with tuned("hopper"):
        shapes = (batch, 32, 1, 64), (batch, 1, 2048, 64), (batch, 1, 2048, 64)
        plan = metalcore.explain("scaled_dot_product_attention", *shapes, dtype=torch.bfloat16, enable_gqa=True)
    assert plan.steps[1].grid == grid


@pytest.mark.parametrize(
    "batch, heads, keys, size, together",
    [
        *[(24, 16, 3000, 128, 16), (25, 16, 3000, 128, 1), (1, 16, 1024, 128, 16), (1, 16, 1088, 128, 1)],
        *[
            (120, 8, 1024, 128, 4),
            (121, 8, 1024, 128, 1),
            (1, 16, 1088, 64, 9),
            (1, 16, 2048, 64, 16),
            (1, 16, 2112, 64, 1),
        ],
    ],
)
def test_threadgroups_that_share_keys_run_together(batch, heads, keys, size, together):
    """Up to 16 of them merge their results themselves, where a GPU of NVIDIA's runs those of all tiles at once. With
    short rows they have two steps for that."""
    shapes = (batch, heads, 1, size), (batch, 1, keys, size), (batch, 1, keys, size)
    with tuned("hopper"), on_meta("cuda") as recorder:
        attend(*(torch.empty(shape, device="meta", dtype=torch.bfloat16) for shape in shapes), enable_gqa=True)
    first, *merge = recorder.recording.dispatches
    assert first.together == together and len(merge) == (together == 1)
    assert first.grid[1] == together or together == 1


@pytest.mark.parametrize(
    "tiles, kernel, together, simdgroups",
    [
        (122, "matrices_64x8", 4, 4),
        *[(tiles, "lanes32_64x8", 1, 8) for tiles in (123, 132)],
        *[(tiles, "matrices_64x8", splits, 4) for tiles, splits in ((133, 1), (158, 1))],
        *[(tiles, "lanes32_64x8", 2, 4) for tiles in (159, 198)],
        *[(tiles, "matrices_64x8", splits, 4) for tiles, splits in ((199, 2), (245, 1))],
        *[(tiles, "lanes16_64x8", 1, 8) for tiles in (246, 264)],
        (265, "matrices_64x8", 1, 4),
        *[(tiles, "lanes32_64x8", 1, 4) for tiles in (266, 396)],
        (397, "matrices_64x8", 1, 4),
    ],
)
def test_lanes_load_operands_where_they_fill_the_gpu(tiles, kernel, together, simdgroups):
    """Cores have 8, 12 or 16 simdgroups then, or not many fewer."""
    shapes = (tiles, 8, 1, 64), (tiles, 1, 1024, 64), (tiles, 1, 1024, 64)
    with tuned("hopper"), on_meta("cuda") as recorder:
        attend(*(torch.empty(shape, device="meta", dtype=torch.bfloat16) for shape in shapes), enable_gqa=True)
    first = recorder.recording.dispatches[0]
    assert first.kernel == f"attention_decode_{kernel}_bfloat" and first.threadgroup[0] == 32 * simdgroups
    assert first.together == together or "matrices" in kernel


@pytest.mark.parametrize(
    "batch, keys, kernel",
    [
        *[(16, 255, "matrices"), (16, 256, "lanes32"), (16, 8192, "lanes32"), (16, 8193, "matrices")],
        *[(24, 511, "matrices"), (24, 512, "lanes32"), (32, 255, "matrices"), (32, 256, "lanes16")],
        *[(48, 255, "matrices"), (48, 256, "lanes32")],
    ],
)
def test_keys_of_lanes(batch, keys, kernel):
    shapes = (batch, 64, 1, 64), (batch, 8, keys, 64), (batch, 8, keys, 64)
    with tuned("hopper"):
        plan = metalcore.explain("scaled_dot_product_attention", *shapes, dtype=torch.bfloat16, enable_gqa=True)
    assert f"attention_decode_{kernel}_64x8_bfloat" in str(plan)


@each_dtype
@pytest.mark.parametrize(
    "batch, heads, kernel", [(16, 64, "lanes32"), (24, 40, "lanes32"), (32, 56, "lanes16"), (40, 64, "lanes32")]
)
@pytest.mark.parametrize("keys", [512, 1033, 1151])
def test_lanes(device, dtype, batch, heads, kernel, keys):
    tensors = inputs(device, dtype, heads=heads, kv_heads=8, batch=batch, keys=keys)
    assert first_kernel(tensors, "hopper") == f"{kernel}_64x8_{SUFFIXES[dtype]}"
    with tuned("hopper"):
        check(reference(*tensors), *tensors)
        sinks = tensor(heads, device=device)
        expected = reference(*tensors, low=-40, high=3, sinks=sinks)
        check(expected, *tensors, window=(40, 3), lower_right=True, sinks=sinks)


@pytest.mark.parametrize("keys, splits", [(8192, 1), (8193, 2)])
def test_sums_of_many_keys_are_shared_though_tiles_fill_the_gpu(keys, splits):
    """The rounding of tensor cores is towards zero, and grows with the keys of a threadgroup."""
    with tuned("hopper"):
        shapes = (64, 128, 1, 128), (64, 32, keys, 128), (64, 32, keys, 128)
        plan = metalcore.explain("scaled_dot_product_attention", *shapes, dtype=torch.bfloat16, enable_gqa=True)
    assert plan.steps[0].grid == (1, 32 * splits, 64)


@each_dtype
@pytest.mark.parametrize("heads, size", [(7, 128), (12, 64), (20, 80)])
@pytest.mark.parametrize("keys", [32, 47, 48, 49, 63, 64, 65, 81, 127, 129, 523])
def test_keys(device, dtype, keys, heads, size):
    """Below and above the keys that a simdgroup and a threadgroup have at a time: some simdgroups have a step more than
    others, or none at all."""
    tensors = inputs(device, dtype, keys=keys, batch=1, heads=heads, kv_heads=1, size=size)
    expected = reference(*tensors)
    for family in FAMILIES:
        with tuned(family):
            assert (shares(tensors) > 1) == (keys >= (128 if family == "hopper" else 256))
            check(expected, *tensors)


@each_dtype
@pytest.mark.parametrize("keys", [32, 33, 47, 48, 49, 63, 64, 65, 127, 128, 255, 256, 257])
def test_keys_of_large_heads(device, dtype, keys):
    """The same for heads of more than 128 numbers, whose threadgroups have half as many keys at a time."""
    tensors = inputs(device, dtype, keys=keys, batch=1, heads=20, kv_heads=1, size=200, value_size=168)
    for family in FAMILIES:
        with tuned(family):
            assert (shares(tensors) > 1) == (keys >= (64 if family == "hopper" else 256))
            check(reference(*tensors), *tensors)
            check(reference(*tensors, low=-50, high=7), *tensors, window=(50, 7), lower_right=True)


def test_many_keys(device):
    tensors = inputs(device, torch.float16, heads=2, kv_heads=1, queries=8, keys=8192, batch=1)
    check(reference(*tensors), *tensors)


@each_dtype
@pytest.mark.parametrize("heads, queries", [(24, 1), (14, 4)])
def test_options(device, dtype, heads, queries):
    tensors = inputs(device, dtype, queries=queries, heads=heads, keys=333)
    sinks = tensor(heads, device=device)
    assert first_kernel(tensors).startswith("matrices")
    for family in FAMILIES:
        with tuned(family):
            options = dict(sinks=sinks, scale=0.3)
            expected = reference(*tensors, low=-40, high=3, **options)
            check(expected, *tensors, window=(40, 3), lower_right=True, **options)
            expected = reference(*tensors, low=-200 - (333 - queries), high=100 - (333 - queries))
            check(expected, *tensors, window=(200, 100))


@each_dtype
def test_rows_that_see_no_key(device, dtype):
    """With the last query 130 keys behind the first key, and only keys behind that seen, rows see nothing."""
    tensors = inputs(device, dtype, queries=3, heads=8, keys=130)
    for family in FAMILIES:
        with tuned(family):
            check(reference(*tensors, high=-127), *tensors, window=(-1, 0))


@each_dtype
def test_large_scores(device, dtype):
    q, k, v = inputs(device, dtype, heads=24)
    expected = reference(q * 64, k, v)
    for family in FAMILIES:
        with tuned(family):
            check(expected, q * 64, k, v)


@each_dtype
def test_numbers_that_are_not_finite(device, dtype):
    q, k, v = inputs(device, dtype, heads=12, kv_heads=1, batch=2)
    v[0, 0, 7, 3], k[1, 0, 5, 2] = torch.inf, torch.nan
    for family in FAMILIES:
        with tuned(family):
            out, lse = attended((q, k, v))
        assert out[1].isnan().all() and lse[1].isnan().all() and lse[0].isfinite().all()
        # An infinite value times a number of a weight, which may be 0, is NaN.
        hidden = ~out[0].isfinite().cpu()
        assert hidden[..., 3].all() and hidden.sum() == 12


@each_dtype
def test_layouts(device, dtype):
    """Heads beside each other, and a batch that is expanded. Rows at no multiple of 16 bytes have other kernels."""
    q, k, v = inputs(device, dtype, heads=20, batch=2)
    expected = reference(q, k, v)
    beside = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert first_kernel(beside).startswith("matrices")
    check(expected, *beside)
    for i in range(3):
        tensors = [torch.nn.functional.pad(x, (1, 2))[..., 1:-2] if j == i else x for j, x in enumerate((q, k, v))]
        assert first_kernel(tensors).startswith("64x8")
        check(expected, *tensors)
    k, v = k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1)
    assert first_kernel((q, k, v)).startswith("matrices")
    check(reference(q, k, v), q, k, v)


def test_other_calls(device):
    """Masks, soft caps and float32 have the kernels without matrices."""
    tensors = inputs(device, torch.float16, heads=20)
    mask = torch.rand(300, device=device) < 0.7
    assert first_kernel(tensors) == "matrices_64x16_half"
    assert first_kernel(tensors, attn_mask=mask) == "64x8_half"
    assert first_kernel(tensors, softcap=3.0) == "64x8_half"
    assert first_kernel([x.float() for x in tensors]) == "64x8_float"
    assert first_kernel(tensors, "apple7") == "matrices_narrow_64x16_half"
    assert first_kernel(tensors, "apple7", attn_mask=mask) == "narrow_general_64x4_half"
    assert first_kernel([x.float() for x in tensors], "apple7") == "narrow_64x4_float"


def test_explain(device):
    tensors = inputs(device, torch.bfloat16, heads=20)
    plan = metalcore.explain("scaled_dot_product_attention", *tensors, enable_gqa=True)
    assert plan.variant == "decode_matrices" and "so many rows" in str(plan)


def test_the_shares_of_keys(device):
    """No threadgroup is left without keys: each has a step of 32 at least, and the last one may have fewer."""
    tensors = inputs(device, torch.bfloat16, heads=8, kv_heads=1, keys=1000, size=256, batch=16)
    with tuned("hopper"):
        plan = metalcore.explain("scaled_dot_product_attention", *tensors, enable_gqa=True)
    assert plan.steps[0].grid == (1, 32, 16)


@each_dtype
def test_the_same_bits(device, dtype):
    tensors = inputs(device, dtype, heads=20, keys=700)
    first, second = attended(tensors), attended(tensors)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@each_dtype
def test_keys_that_other_rows_see_only(device, dtype):
    """The last rows see keys of large scores that the first ones do not."""
    q, k, v = inputs(device, dtype, heads=4, kv_heads=1, queries=4, keys=128, batch=1)
    k[:, :, -3:] *= 16
    for family in FAMILIES:
        with tuned(family):
            options = dict(is_causal=True, lower_right=True)
            check(reference(q, k, v, high=0), q, k, v, **options)
            found, rounded = attended((q, k, v), **options), rounds_weights(kernels(q, k, v, **options)[0])
        expected = reference(q, wide(k[:, :, :-3]), wide(v[:, :, :-3]))
        first = [[x[:, :, :1] for x in both] for both in (found, expected)]
        assert_attention_near(*first, v, rounded)
