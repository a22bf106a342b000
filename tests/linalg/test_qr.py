"""qr's factors against float64, in every variant."""

import pytest
import torch
from matrices import EPS, matrices, norm
from opinfo import check_samples
from qr_cases import COMPLETE_SHAPES, SHAPES, boundaries, check_factors, plan
from rows import FAMILIES, tuned

import metalcore

CASES = [(variant, m, n, mode) for mode in ("reduced", "r") for variant, shapes in SHAPES.items() for m, n in shapes]
CASES += [(variant, m, n, "complete") for variant, shapes in COMPLETE_SHAPES.items() for m, n in shapes]


def check(device, m, n, mode, only=None):
    cases = matrices(m, n)
    cases = {name: cases[name] for name in only or cases}
    A = torch.stack(list(cases.values()))
    Q, R = metalcore.qr(A.to(device), mode)
    assert Q.device.type == R.device.type == torch.device(device).type
    check_factors(A, Q.cpu(), R.cpu(), mode, list(cases))


@pytest.mark.parametrize("variant, m, n, mode", CASES)
def test_factors(device, variant, m, n, mode):
    with tuned("baseline"):
        assert metalcore.explain("qr", (m, n), mode=mode).variant == variant
        check(device, m, n, mode)


@pytest.mark.parametrize("mode", ["reduced", "complete", "r"])
@pytest.mark.parametrize("family", FAMILIES[1:])
def test_where_other_gpus_take_other_kernels(device, family, mode):
    """Shapes below and above the boundaries of a family's plans that differ from the baseline's; one for PyTorch."""
    tried = set()
    for m, n in boundaries(family, mode):
        chosen = plan(family, m, n, mode)
        if chosen != plan("baseline", m, n, mode) and chosen not in tried:
            with tuned(family):
                check(device, m, n, mode, only=["random", "rank-deficient", "columns from 1e-30 to 1e30"])
        tried |= {chosen} if chosen[0] == "torch" else set()


@pytest.mark.parametrize("m, n", [(5, 5), (64, 20), (70, 40), (300, 20), (1300, 12), (150, 140)])
def test_as_lapack_entry_by_entry(device, m, n):
    A = torch.randn(3, m, n)
    for mode in ("reduced", "r", "complete")[: 3 if m <= 150 else 2]:
        actual, expected = metalcore.qr(A.to(device), mode), torch.linalg.qr(A.double(), mode)
        assert norm(actual.R.cpu() - expected.R).max() <= 10 * m * n * EPS * norm(A).max()
        if mode == "reduced":  # the other columns of "complete" are not unique
            assert norm(actual.Q.cpu() - expected.Q).max() <= 10 * m * n * EPS * n**0.5
        if mode == "complete":
            assert norm(actual.Q.cpu() - expected.Q).max() <= 10 * m * n * EPS * m**0.5


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("m, n", [(5, 4), (16, 16), (60, 30), (100, 50), (400, 20), (1500, 10), (200, 150)])
def test_a_bad_matrix_spoils_its_own_batch_entry_only(device, m, n, bad):
    A = torch.randn(5, m, n)
    A[2, m - 1, 1] = bad
    Q, R = (x.cpu() for x in metalcore.qr(A.to(device)))
    assert not Q[2].isfinite().all() and not R[2].isfinite().all()
    good = [0, 1, 3, 4]
    check_factors(A[good], Q[good], R[good], "reduced", ["random"] * 4)


@pytest.mark.parametrize("batch", [7, 130])
@pytest.mark.parametrize("m, n", [(6, 5), (12, 12), (30, 20), (64, 32), (40, 40)])
def test_many_matrices(device, m, n, batch):
    A = torch.randn(batch, m, n)
    Q, R = (x.cpu() for x in metalcore.qr(A.to(device)))
    check_factors(A, Q, R, "reduced", ["random"] * batch)


def test_a_large_matrix(device):
    n = 1100  # several threadgroups share a panel above 1024 rows
    A = torch.randn(n, n)
    Q, R = (x.cpu().double() for x in metalcore.qr(A.to(device)))
    bound = 10 * n * EPS
    assert not R.tril(-1).any()
    assert norm(Q.mT @ Q - torch.eye(n)) <= bound
    assert norm(A - Q @ R) <= bound * norm(A)
    assert torch.equal(R.diagonal().sign(), torch.linalg.qr(A.double(), "r").R.diagonal().sign())


@pytest.mark.parametrize("m, n", [(4000, 36), (100000, 8)])
def test_tall_and_thin_takes_no_square_of_the_height(device, m, n):
    A = torch.randn(m, n)
    Q, R = (x.cpu() for x in metalcore.qr(A.to(device)))
    check_factors(A[None], Q[None], R[None], "reduced", ["random"])
    plan = metalcore.explain("qr", (m, n))
    assert plan.variant == "tall"
    # A dispatch has at most as many threads as the matrix has entries, times the values that a lane's registers hold.
    for step in plan.steps:
        assert step.grid[0] * step.threadgroup[0] <= 8 * m * n


def test_opinfo_samples(device):
    # Gradients: test_qr_gradient.py, with modes and shapes that have one.
    check_samples(metalcore.qr, "linalg.qr", device, torch.float32, orders=0)


def test_what_goes_to_torch(device):
    A = torch.randn(2100, 70)
    with tuned("hopper"):
        for mode in ("reduced", "r"):
            assert metalcore.explain("qr", (2100, 70), mode=mode).variant == "torch"
            Q, R = (x.cpu() for x in metalcore.qr(A.to(device), mode))
            assert Q.is_contiguous() and R.is_contiguous()
            check_factors(A[None], Q[None] if mode != "r" else Q, R[None], mode, ["random"])


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
