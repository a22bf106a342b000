"""Products by units that multiply tensors, against float64 products."""

import re

import pytest
import torch
import torch.nn.functional as F
from references import tensor, wide
from rows import tuned
from test_matmul import assert_near, matrix

import metalcore
from metalcore import _C
from metalcore.msl.language.cuda_source import cuda_source
from metalcore.msl.nvidia import cuda, nvrtc
from metalcore.recording import on_meta, record

HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
NAMES = {torch.float16: "half", torch.bfloat16: "bfloat"}

pytestmark = pytest.mark.only_on("simulator", "cuda")


@pytest.fixture(autouse=True)
def units(device):
    """Units take what they can, wide tiles too, on a GPU that runs few threadgroups at once."""
    use_threadgroups(device, 2)
    yield
    _C.use_measured(device, _C.gpu_family(device), [])


def use_threadgroups(device, count):
    numbers = [("gemm", "units", [1]), ("gemm", "wide_tiles", [1]), ("gemm", "unit_threadgroups", [count])]
    _C.use_measured(device, _C.gpu_family(device), numbers)


@HALVES
@pytest.mark.parametrize("left", ["rows", "columns", "offset"])
@pytest.mark.parametrize("right", ["rows", "columns", "offset"])
def test_layouts(device, dtype, left, right):
    """Sizes lie at and beside those of tiles, of packs of 16 bytes and of the pipeline's steps of 64 terms."""
    layout = "".join("t" if name == "columns" else "n" for name in (left, right))
    flipped = "".join("t" if name == "n" else "n" for name in reversed(layout))
    for rows, columns, terms, tile in (
        (256, 128, 136, "_deep"),
        (131, 129, 137, "_wide"),
        (200, 33, 130, "_many"),
        (150, 32, 40, "_several"),
        (64, 17, 24, "_small"),
        (131, 129, 9, "_short"),
        (200, 33, 128, "_short_small"),
        (100, 100, 130, "_broad"),
    ):
        a, b = matrix(rows, terms, left, dtype, device), matrix(terms, columns, right, dtype, device)
        result, recording = record(metalcore.matmul, a, b)
        assert recording.kernels == (f"gemm_unit_{layout}{tile}_{NAMES[dtype]}",)
        assert_near(result, a, b)
        if columns <= 64:
            result, recording = record(metalcore.matmul, b.T, a.T)
            assert recording.kernels == (f"gemm_unit_{layout}{tile}_{NAMES[dtype]}",)
            assert_near(result, b.T, a.T)
    a, b = matrix(12, 72, left, dtype, device), matrix(72, 200, right, dtype, device)
    result, recording = record(metalcore.matmul, a, b)
    assert recording.kernels == (f"gemm_unit_{flipped}_few_{NAMES[dtype]}",)
    assert_near(result, a, b)


@HALVES
@pytest.mark.parametrize("left", ["rows", "columns", "offset"])
@pytest.mark.parametrize("right", ["rows", "columns"])
def test_threadgroups_walk_along_tiles_of_few_terms(device, dtype, left, right):
    """Two cores have room for 6 tiles below each other, or for 8 beside each other, which may be of a batch. Of more
    than 64 terms, 4 threadgroups walk."""
    layout = "".join("t" if name == "columns" else "n" for name in (left, right))
    for rows, columns, terms, batch, tile in (
        (192, 129, 128, [], "_short"),
        (193, 129, 128, [], "_down"),
        (400, 70, 65, [], "_down"),
        (65, 129, 64, [2], "_short"),
        (65, 129, 64, [3], "_along_short"),
        (130, 260, 65, [2], "_along"),
        (65, 129, 128, [3], "_along"),
    ):
        a, shape = matrix(rows, terms, left, dtype, device), (*batch, terms, columns)
        b = tensor(*shape, dtype=dtype, device=device)
        b = b.mT.contiguous().mT if right == "columns" else b
        bias = tensor(columns, dtype=dtype, device=device)
        residual = tensor(*batch, rows, columns, dtype=dtype, device=device)
        result, recording = record(metalcore.matmul, a, b, bias=bias, residual=residual, activation="relu")
        assert recording.kernels == (f"gemm_unit_{layout}{tile}_{NAMES[dtype]}",)
        assert_near(result, a, b, function=F.relu, added=wide(bias) + wide(residual))


def test_batches_of_two_dimensions_have_a_threadgroup_for_each_tile(device):
    a, b = matrix(65, 64, "rows", torch.bfloat16, device), tensor(2, 3, 64, 129, dtype=torch.bfloat16, device=device)
    for batch, tile in ((b, "along_short"), (b[:, :2], "short")):
        result, recording = record(metalcore.matmul, a, batch)
        assert recording.kernels == (f"gemm_unit_nn_{tile}_bfloat",)
        assert_near(result, a, batch)


@HALVES
@pytest.mark.parametrize("shape", [(130, 140, 136), (130, 140, 40), (60, 140, 40), (140, 12, 40)], ids=str)
def test_what_is_made_of_sums(device, dtype, shape):
    rows, columns, terms = shape
    a, b = tensor(rows, terms, dtype=dtype, device=device), tensor(terms, columns, dtype=dtype, device=device)
    bias, residual = tensor(columns, dtype=dtype, device=device), tensor(rows, columns, dtype=dtype, device=device)
    result = metalcore.matmul(a, b, bias=bias, residual=residual, activation="gelu", alpha=2.0, beta=-1.0)
    assert_near(result, 2 * wide(a), b, function=F.gelu, added=wide(bias) - wide(residual))


@HALVES
@pytest.mark.parametrize("shape", [(16, 80, 2500), (70, 40, 3100), (130, 70, 2049)], ids=str)
def test_threadgroups_share_terms(device, dtype, shape):
    """The last part of the terms is shorter. Few tiles are small."""
    use_threadgroups(device, 132)
    rows, columns, terms = shape
    a, b = tensor(rows, terms, dtype=dtype, device=device), tensor(columns, terms, dtype=dtype, device=device).T
    bias = tensor(columns, dtype=dtype, device=device)
    result, recording = record(metalcore.matmul, a, b, bias=bias, activation="relu")
    assert ("small" if min(rows, columns) > 16 else "few") in recording.kernels[0]
    together = recording.dispatches[0].together > 1
    assert recording.kernels[1:] == (() if together else (f"gemm_unit_sum_{NAMES[dtype]}",))
    assert_near(result, a, b, function=torch.relu, added=wide(bias))


@pytest.mark.parametrize(
    "rows, columns, tile, splits, together",
    [
        *[(128, 4096, "_deep", 3, 3), (128, 4992, "_deep", 3, 3), (128, 5120, "_wide", 5, 5)],
        *[(256, 4224, "_deep", 2, 2), (256, 4352, "_wide", 3, 3)],
        *[(256, 4096, "_deep", 2, 2), (512, 4096, "_wide", 2, 2)],  # 128 tiles, and 64
        *[(64, 3840, "_many", 4, 4), (64, 4096, "_many", 4, 1)],
        *[(1024, 256, "_deep", 6, 6), (256, 384, "_deep", 8, 8), (256, 256, "_small", 8, 8)],
        (32, 1024, "_several", 8, 8),
    ],
)
def test_threadgroups_that_share_terms_run_together(rows, columns, tile, splits, together):
    """Where a GPU of NVIDIA's runs those of all tiles at once: two each of 66 tiles, three of 39, four of 30. Wide and
    small tiles let more of them run."""
    a, b = (torch.empty(*shape, device="meta", dtype=torch.bfloat16) for shape in ((rows, 4096), (4096, columns)))
    with tuned("hopper"), on_meta("cuda") as recorder:
        metalcore.matmul(a, b)
    first, *rest = recorder.recording.dispatches
    assert first.kernel.removesuffix("_bfloat").endswith(tile)
    assert (first.together, first.together * first.grid[2]) == (together, splits)
    assert len(rest) == (splits > together)


def test_batches(device):
    a, b = (tensor(*shape, dtype=torch.bfloat16, device=device) for shape in ((3, 1, 70, 40), (2, 40, 72)))
    residual = tensor(3, 2, 70, 72, dtype=torch.bfloat16, device=device)
    assert_near(metalcore.matmul(a, b, residual=residual), a, b, added=wide(residual))


def test_groups(device):
    """Groups begin anywhere, one is empty, and the last rows are in no group. There are more tiles than cores."""
    _C.use_measured(device, _C.gpu_family(device), [("gemm", "units", [1]), ("gemm", "unit_threadgroups", [5])])
    a, b = (tensor(*shape, dtype=torch.bfloat16, device=device) for shape in ((300, 40), (3, 40, 72)))
    ends = torch.tensor([7, 7, 150], dtype=torch.int32, device=device)
    result, recording = record(metalcore.grouped_gemm, a, b, ends)
    assert recording.kernels == ("gemm_unit_nn_bfloat",)
    assert_near(result[:7], a[:7], b[0])
    assert_near(result[7:150], a[7:150], b[2])
    assert not result[150:].any()
    a, b = (tensor(*shape, dtype=torch.float16, device=device) for shape in ((70, 300), (300, 72)))
    result = metalcore.grouped_gemm(a, b, ends)
    assert_near(result[0], a[:, :7], b[:7])
    assert_near(result[2], a[:, 7:150], b[7:150])
    assert not result[1].any()


@pytest.mark.parametrize(
    "a, b", [((70, 40), (80, 40)), ((8, 70), (70, 80)), ((1, 1), (1, 100))], ids=["apart", "few rows", "one term"]
)
def test_what_other_kernels_take(device, a, b):
    a, b = tensor(*a, dtype=torch.bfloat16, device=device), tensor(*b, dtype=torch.bfloat16, device=device)
    b = b.T[::2] if a.shape == (70, 40) else b
    a = a[:, ::2] if a.shape == (70, 40) else a
    result, recording = record(metalcore.matmul, a, b)
    assert "unit" not in recording.kernels[0]
    assert_near(result, a, b)


def test_float32_stays_float32(device):
    a, b = tensor(130, 70, device=device), tensor(70, 140, device=device)
    result, recording = record(metalcore.matmul, a, b)
    assert recording.kernels == ("gemm_float",)
    assert_near(result, a, b)


def test_which_products_have_units(device):
    def variant(a, b):
        return metalcore.explain("matmul", a, b, dtype=torch.bfloat16).variant

    with tuned("hopper"):
        names = {shapes: variant(*shapes) for shapes in (
            ((9 * 128, 192), (192, 8 * 256)),
            ((71 * 128, 192), (192, 256)),  # fewer wide tiles
            ((132 * 128, 192), (192, 128)),  # a tile for each core
            ((4096, 192), (192, 64)),
            ((66 * 64, 192), (192, 256)),  # a broad tile for each core
            ((66 * 64 + 1, 192), (192, 256)),
            ((1024, 2049), (2049, 256)),  # one for two cores
            ((1152, 2049), (2049, 256)),
            ((4096, 128), (128, 72)),
            ((4096, 128), (128, 64)),
            ((4096, 4096), (4096, 64)),
            ((32, 4096), (4096, 4096)),
            ((16, 4096), (4096, 4096)),
            ((8, 64), (64, 4096)),
        )}  # fmt: skip
    # A GPU of NVIDIA's runs threadgroups together that share the terms of large tiles.
    shared = "deep" if torch.device(device).type == "cuda" else "small"
    tiles = ["wide", "", "deep", "small", "broad", "deep", shared, "deep", "short", "short_small", "many"]
    names_of_tiles = ["gemm_unit_nn" + (tile and f"_{tile}") for tile in tiles]
    assert list(names.values()) == [*names_of_tiles, "gemm_unit_tt_several", "gemm_unit_tt_few", "gemv_columns4"]
    for family in ("baseline", "apple10", "simulator"):
        with tuned(family):
            assert not variant((4096, 64), (64, 4096)).startswith("gemm_unit")


def test_sums_stay_in_registers_until_their_products_end():
    """Where the compiler stores sums before, ptxas makes products of tensor cores wait for each other."""
    for tile in ("few", "several", "many", "small", "broad"):
        kernel = f"gemm_unit_nt_{tile}_bfloat"
        text, _ = cuda_source(*cuda._read_family("gemm/units"), [(kernel, "b0,b1,b2,b3,b4,b5,i6:0")])
        ptx = nvrtc.find().compile_with_ptx(text, 90)[1].decode()
        begin, end = ptx.rindex("wgmma.commit_group"), ptx.rindex("wgmma.wait_group.sync.aligned 0")
        assert begin < end
        assert "st.local" not in ptx[begin:end]


def test_addresses_of_tiles_do_not_number_their_threadgroup():
    """The number of one that runs together with others is in the bits that a descriptor has for a distance."""
    text, _ = cuda_source(*cuda._read_family("gemm/units"), [("gemm_unit_nn_wide_bfloat", "b0,b1,b2,b3,b4,b5,i6:0")])
    ptx = nvrtc.find().compile_with_ptx(text, 90)[1].decode()
    assert re.search(r"and\.b32\s+%r\d+, %r\d+, 262143;", ptx)
