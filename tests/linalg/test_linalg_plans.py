"""The kernels that the baseline plans for shapes on both sides of each boundary, as metalcore.explain tells them."""

import pytest
from rows import tuned

import metalcore

REFLECTORS = ["reflectors_products_64", "reflectors_factor_64", "reflectors_apply_64"]
PANEL = ["reflectors_products_16", "reflectors_apply_16", *REFLECTORS, "qr_upper"]
SCALED = ["qr_panel_maxima", "qr_panel_scale", "qr_panel_step", "qr_panel_last"]
BLOCKED_LU = [
    "lu_identity_permutation",
    "lu_update",
    "lu_panel_512",
    "lu_rows",
    "lu_top",
    "lu_permute",
    "trsv_block_1x16",
]
APPLIED = ["reflectors_products_16", "reflectors_factor_16", "reflectors_apply_16"]
COMPLETE = ["qr_panel", "reflectors_products_16", "reflectors_factor_16", "qr_upper", "qr_identity"]
# (shapes, options, variant, kernels), without the kernel of functions that raise
PLANS = {
    "cholesky_ex": [
        ([(3, 3)], {"upper": True}, "simd", ["cholesky_simd_4"]),
        ([(4096, 32, 32)], {}, "simd", ["cholesky_simd_32"]),
        ([(33, 33)], {}, "block", ["cholesky_block_64"]),
        ([(7, 128, 128)], {}, "block", ["cholesky_block_128"]),
        ([(257, 257)], {}, "blocked", ["cholesky_triangle", "cholesky_panel", "syrk", "cholesky_diagonal"]),
        ([(0, 0)], {}, "empty", []),
        ([(0, 5, 5)], {}, "empty", []),
    ],
    "geqrf": [
        ([(3, 3)], {}, "simd", ["qr_simd_8x8"]),
        ([(128, 64)], {}, "block", ["qr_block_128"]),
        ([(2000, 16)], {}, "blocked", ["qr_panel"]),
        ([(0, 3)], {}, "empty", []),
    ],
    "householder_product": [
        ([(100, 64, 32), (100, 32)], {}, "simd", ["qr_simd_64x32"]),
        ([(300, 200), (200,)], {}, "blocked", [*REFLECTORS[:2], "qr_identity", REFLECTORS[2]]),
    ],
    "ormqr": [([(30, 8), (8,), (30, 5)], {}, "blocked", APPLIED)],
    "qr": [
        ([(3, 3)], {"mode": "reduced"}, "simd", ["qr_simd_8x8"]),
        ([(100, 64, 32)], {"mode": "r"}, "simd", ["qr_simd_64x32"]),
        ([(64, 32)], {"mode": "complete"}, "block", ["qr_block_64"]),
        ([(1024, 128, 128)], {"mode": "reduced"}, "block", ["qr_block_128"]),
        ([(3000, 17)], {"mode": "r"}, "tall", ["qr_block_512", "qr_tall_signs"]),
        ([(500, 16)], {"mode": "complete"}, "blocked", [*COMPLETE, "reflectors_apply_16"]),
        ([(100, 500)], {"mode": "r"}, "blocked", ["qr_panel", *PANEL]),
        ([(3000, 80)], {"mode": "r"}, "blocked", [*SCALED, *PANEL]),
        ([(0, 5)], {"mode": "reduced"}, "empty", []),
    ],
    "inv_ex": [([(100000, 3, 3)], {}, "thread", ["lu_thread_3"])],
    "lu_factor_ex": [
        ([(10, 12, 30)], {}, "simd", ["lu_simd_32x0"]),
        ([(3, 1500, 200)], {}, "blocked", ["lu_update", "lu_panel_2048", "lu_rows", "lu_top"]),
    ],
    "solve_ex": [
        ([(4096, 32, 32), (4096, 32)], {}, "simd", ["lu_simd_32x4"]),
        ([(128, 128), (128, 128)], {}, "block", ["lu_block_16", "lu_permute", "trsm_panel"]),
        ([(300, 300), (300,)], {}, "blocked", BLOCKED_LU),
        ([(0, 64, 64), (64, 2)], {}, "empty", []),
    ],
    "det": [([(5, 64, 64)], {}, "block", ["lu_block_16", "lu_determinant"])],
    "lu_solve": [([(7, 20, 20), (7, 20), (7, 20, 3)], {}, "simd", ["lu_simd_32x4"])],
    "lu": [([(0, 5)], {}, "empty", [])],
    "solve_triangular": [
        ([(3, 3), (3, 1)], {}, "simd", ["trsv_simd_8x1"]),
        ([(100, 12, 12), (100, 12, 4)], {}, "simd", ["trsv_simd_16x4"]),
        ([(5, 32, 32), (32, 40)], {}, "simd", ["trsm_simd_32x32"]),
        ([(33, 33), (1, 33)], {"left": False}, "block", ["trsv_block_1x2"]),
        ([(1024, 128, 128), (1024, 128, 128)], {}, "block", ["trsm_block_128"]),
        ([(300, 300), (300, 20)], {}, "blocked", ["trsm_panel", "trsm_update"]),
        ([(1100, 1100), (1100, 2)], {}, "blocked", ["trsv_block_4x4", "trsv_update_4"]),
        ([(0, 5, 5), (5, 2)], {}, "empty", []),
    ],
}
# These raise, and plan the kernel that looks for a failure behind the kernels of the other.
RAISING = {"cholesky": "cholesky_ex", "inv": "inv_ex", "lu_factor": "lu_factor_ex", "solve": "solve_ex"}


@pytest.mark.parametrize("op", [*PLANS, *RAISING])
def test_plans(op):
    for shapes, options, variant, kernels in PLANS[RAISING.get(op, op)]:
        with tuned("baseline"):
            plan = metalcore.explain(op, *shapes, **options)
        assert (plan.variant, list(plan.kernels)) == (variant, kernels + ["info_any"] * (op in RAISING)), shapes
        assert all(step.threadgroup[0] <= 1024 for step in plan.steps)
        assert len(shapes) > 1 or "x".join(map(str, shapes[0][-2:])) in plan.why


def test_nvidias_large_matrices_are_pytorchs():
    with tuned("hopper"):
        for op, n in (("qr", 4096), ("geqrf", 4096), ("lu_factor", 4097)):
            plan = metalcore.explain(op, (n, n))
            assert plan.variant == "torch" and "PyTorch" in plan.why, op
            assert plan.kernels == (("info_any",) if op == "lu_factor" else ())
        assert metalcore.explain("qr", (2, 4096, 4096)).variant == "blocked"
        assert metalcore.explain("lu_factor", (4096, 4096)).variant == "blocked"


def test_the_batch_is_the_broadcast_one():
    steps = lambda *call: metalcore.explain(*call).steps[0].grid[0]  # noqa: E731
    assert steps("solve", (2, 1, 64, 64), (1, 3, 64, 2)) == 6
    assert steps("solve", (5, 64, 64), (64,)) == steps("solve", (64, 64), (5, 64, 1)) == 5
    assert steps("lu_solve", (20, 1, 20, 20), (20, 1, 20), (30, 20, 2)) == steps(
        "lu_solve", (600, 20, 20), (600, 20), (600, 20, 2)
    )


@pytest.mark.parametrize(
    "call, options, message",
    [
        (("cholesky", (3, 4)), {}, "square"),
        (("qr", (3, 3)), {"mode": "x"}, "unrecognized mode"),
        (("qr", (3,)), {}, "at least 2 dimensions"),
        (("solve", (2, 4, 4), (3, 4, 2)), {}, "does not take these arguments: .*broadcast"),
        (("solve_triangular", (3, 3), (7, 7)), {}, "Incompatible shapes"),
    ],
)
def test_what_an_op_refuses_has_no_plan(call, options, message):
    with pytest.raises(ValueError, match=message):
        metalcore.explain(*call, **options)
