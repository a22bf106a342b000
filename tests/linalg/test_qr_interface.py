"""qr as a replacement for torch.linalg.qr: arguments, result, layouts, dtypes, errors, explain."""

import pytest
import torch
from matrices import EPS, norm
from opinfo import check_samples
from qr_cases import check_factors
from references import assert_same_error
from rows import tuned

import metalcore

MODES = ["reduced", "complete", "r"]


def assert_same(actual, expected, tolerance=1e-5):
    for ours, theirs in zip(actual, expected):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours.cpu().double(), theirs.double(), rtol=0, atol=tolerance)


def test_is_the_namesake(device):
    assert metalcore.qr is metalcore.linalg.qr
    A = torch.randn(4, 3, device=device)
    result = metalcore.qr(A)
    assert isinstance(result, torch.return_types.linalg_qr)
    assert result[0] is result.Q and result[1] is result.R
    assert_same(metalcore.qr(A, "complete"), torch.linalg.qr(A.cpu().double(), "complete"))
    assert_same(metalcore.qr(A=A, mode="r"), torch.linalg.qr(A.cpu().double(), "r"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "shape",
    [(0, 3), (3, 0), (0, 0), (2, 0, 3), (2, 3, 0), (0, 3, 2), (0, 0, 0), (2, 0, 70, 70), (0, 1500, 8), (0, 200, 200)],
)
def test_empty(device, shape, mode):
    actual, expected = metalcore.qr(torch.empty(shape, device=device), mode), torch.linalg.qr(torch.empty(shape), mode)
    for ours, theirs in zip(actual, expected):
        assert ours.shape == theirs.shape
        assert torch.equal(ours.cpu(), theirs)


LAYOUTS = {
    "transposed": lambda: torch.randn(3, 40, 70).mT,
    "every other": lambda: torch.randn(6, 80, 60)[::2, 1::2, ::3],
    "with an offset": lambda: torch.randn(4, 50, 50)[1:, 3:30, 7:30],
    "expanded batch": lambda: torch.randn(1, 20, 10).expand(5, 20, 10),
    "expanded rows": lambda: torch.randn(3, 1, 10).expand(3, 20, 10),
    "expanded columns": lambda: torch.randn(3, 20, 1).expand(3, 20, 10),
    "permuted batches": lambda: torch.randn(2, 3, 4, 6, 5).permute(2, 0, 1, 3, 4),
    "batches in the middle": lambda: torch.randn(9, 3, 2, 7).permute(1, 2, 0, 3),
    "tall, transposed": lambda: torch.randn(2, 12, 1500).mT,
    "tall, sliced": lambda: torch.randn(3000, 20)[::2, 2:9],
    "large, transposed": lambda: torch.randn(150, 140).mT,
    "large, expanded": lambda: torch.randn(1, 150, 150).expand(2, 150, 150),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(device, layout):
    A = LAYOUTS[layout]()
    # The layout on the device is the same: A.to(device) might pack the elements.
    elements = torch.empty(0).set_(A.untyped_storage())
    on_device = elements.to(device).as_strided(A.shape, A.stride(), A.storage_offset())
    Q, R = (x.cpu() for x in metalcore.qr(on_device))
    flat = A.reshape(-1, *A.shape[-2:])
    check_factors(flat, Q.reshape(-1, *Q.shape[-2:]), R.reshape(-1, *R.shape[-2:]), "reduced", ["other"] * len(flat))


def test_out(device):
    A = torch.randn(3, 6, 4, device=device)
    expected = metalcore.qr(A)
    Q, R = torch.empty(0, device=device), torch.empty(3, 4, 8, device=device)[..., ::2]
    result = metalcore.qr(A, out=(Q, R))
    assert result.Q is Q and result.R is R
    assert torch.equal(Q, expected.Q) and torch.equal(R, expected.R) and R.stride() == (32, 8, 2)
    metalcore.qr(A, out=(Q, A))  # in place of the input
    assert torch.equal(A, expected.R)


def test_out_that_does_not_fit(device):
    A = torch.randn(3, 3, device=device)
    new = lambda **kwargs: torch.empty(0, **{"device": device, **kwargs})  # noqa: E731
    with pytest.raises(TypeError, match="expected tuple of 2 elements but got 1"):
        metalcore.qr(A, out=(new(),))
    with pytest.raises(RuntimeError, match="Expected out tensor to have dtype"):
        metalcore.qr(A, out=(new(dtype=torch.int32), new()))
    with pytest.raises(RuntimeError, match="Expected out tensor to be on"):
        metalcore.qr(A, out=(new(), new(device="cpu")))
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        metalcore.qr(A.requires_grad_(), out=(new(), new()))


@pytest.mark.parametrize(
    "call",
    [
        lambda qr, device: qr(torch.randn(3, 3, device=device), "x"),
        lambda qr, device: qr(torch.randn(3, 3, device=device), "Reduced"),
        lambda qr, device: qr(torch.randn(3, device=device)),
        lambda qr, device: qr(torch.tensor(1.0, device=device)),
        lambda qr, device: qr(torch.ones(3, 3, dtype=torch.int32, device=device)),
        lambda qr, device: qr(torch.ones(3, 3, dtype=torch.bool, device=device)),
        lambda qr, device: qr([1.0]),
        lambda qr, device: qr(None),
    ],
)
def test_errors_are_torchs(device, call):
    assert_same_error(lambda: call(metalcore.qr, device), lambda: call(torch.linalg.qr, "cpu"))


def test_opinfo_samples(device):
    # Gradients: test_qr_gradient.py, with modes and shapes that have one.
    check_samples(metalcore.qr, "linalg.qr", device, torch.float32, orders=0)


@pytest.mark.parametrize(
    "shape, mode, variant, kernels",
    [
        ((3, 3), "reduced", "simd", ["qr_simd_8x8"]),
        ((100, 64, 32), "r", "simd", ["qr_simd_64x32"]),
        ((64, 32), "complete", "block", ["qr_block_64"]),
        ((1024, 128, 128), "reduced", "block", ["qr_block_128"]),
        ((3000, 17), "r", "tall", ["qr_block_512", "qr_tall_signs"]),
        (
            (500, 16),
            "complete",
            "blocked",
            [
                "qr_panel",
                "reflectors_products_16",
                "reflectors_factor_16",
                "qr_upper",
                "qr_identity",
                "reflectors_apply_16",
            ],
        ),
        (
            (100, 500),
            "r",
            "blocked",
            [
                "qr_panel",
                "reflectors_products_16",
                "reflectors_apply_16",
                "reflectors_products_64",
                "reflectors_factor_64",
                "reflectors_apply_64",
                "qr_upper",
            ],
        ),
        (
            (3000, 80),
            "r",
            "blocked",
            [
                "qr_panel_maxima",
                "qr_panel_scale",
                "qr_panel_step",
                "qr_panel_last",
                "reflectors_products_16",
                "reflectors_apply_16",
                "reflectors_products_64",
                "reflectors_factor_64",
                "reflectors_apply_64",
                "qr_upper",
            ],
        ),
        ((0, 5), "reduced", "empty", []),
    ],
)
def test_explain(shape, mode, variant, kernels):
    with tuned("baseline"):
        plan = metalcore.explain("qr", shape, mode=mode)
    assert plan.variant == variant
    assert list(plan.kernels) == kernels
    assert "x".join(map(str, shape[-2:])) in plan.why
    assert all(step.threadgroup[0] <= 1024 for step in plan.steps)


def test_explain_says_what_goes_to_torch():
    with tuned("hopper"):
        plan = metalcore.explain("qr", (4096, 4096))
        assert plan.variant == "torch" and not plan.kernels and "PyTorch" in plan.why
        assert metalcore.explain("qr", (2, 4096, 4096)).variant == "blocked"


def test_what_goes_to_torch(device):
    A = torch.randn(2100, 70)
    with tuned("hopper"):
        for mode in ("reduced", "r"):
            assert metalcore.explain("qr", (2100, 70), mode=mode).variant == "torch"
            Q, R = (x.cpu() for x in metalcore.qr(A.to(device), mode))
            assert Q.is_contiguous() and R.is_contiguous()
            check_factors(A[None], Q[None] if mode != "r" else Q, R[None], mode, ["random"])


def test_explain_refuses_what_qr_refuses():
    with pytest.raises(ValueError, match="unrecognized mode"):
        metalcore.explain("qr", (3, 3), mode="x")
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        metalcore.explain("qr", (3,))


@pytest.mark.only_on("simulator")
@pytest.mark.parametrize(
    "shape, mode",
    [
        ((3, 4, 5), "reduced"),
        ((40, 20), "complete"),
        ((2, 60, 40), "reduced"),
        ((1030, 3), "reduced"),
        ((150, 140), "r"),
        ((2060, 66), "r"),
    ],
)
def test_kernels_are_clean_in_checking_mode(device, shape, mode):
    A = torch.randn(shape)
    with metalcore.simulator.checking():
        R = metalcore.qr(A.to(device), mode).R
    expected = torch.linalg.qr(A.double(), mode)
    assert norm(R.cpu() - expected.R).max() <= 10 * max(shape) ** 2 * EPS * norm(A).max()
