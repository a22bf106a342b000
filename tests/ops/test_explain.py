"""metalcore.explain and the choice of variants."""

import pytest
import torch
from rows import FAMILIES, LONGEST, lengths, tuned, variants

import metalcore
from metalcore.recording import on_meta

OPS = ["softmax", "log_softmax", "rms_norm", "add_rms_norm"]


@pytest.mark.parametrize("op", OPS)
def test_every_variant_of_a_gpu_is_tested(op):
    found = set()
    for family in FAMILIES:
        with tuned(family):
            found |= variants(op, torch.float32)
            assert max(lengths(op, torch.float32)) < LONGEST
    # Softmax takes "looped" only for more rows, and norms take "split" only for longer ones.
    assert found >= {"thread", "simd1", "simd4", "block4", "block8", "looped" if op.endswith("rms_norm") else "split"}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("op", OPS)
def test_plans_keep_to_the_limits(op, family):
    with tuned(family):
        for rows in (1, 7, 100000):
            for length in (1, 16, 17, 500, 4096, 131072):
                for step in metalcore.explain(op, (rows, length)).steps:
                    threads = step.threadgroup[0] * step.threadgroup[1] * step.threadgroup[2]
                    assert 1 <= threads <= 1024 and (step.threads or threads % 32 == 0)


def test_softmax_along_another_dimension():
    explanation = metalcore.explain("softmax", (64, 128, 256), dim=1)
    assert explanation.variant == "columns" and "256 apart" in explanation.why
    assert explanation.kernels == ("softmax_columns_float",)


def test_text_and_dtype():
    text = str(metalcore.explain("gelu", torch.empty(10, dtype=torch.bfloat16), approximate="tanh"))
    assert "gelu_tanh_packed_bfloat: 1×1×1 threads" in text and "gelu_tanh_dense_bfloat: 2×1×1 threads" in text
    assert "half" in metalcore.explain("silu", (3,), dtype=torch.float16).kernels[0]


def test_errors():
    with pytest.raises(ValueError, match="knows no op 'convolve'; it knows .*softmax"):
        metalcore.explain("convolve", (3,))
    with pytest.raises(ValueError, match="softmax needs the shape of x"):
        metalcore.explain("softmax")
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        metalcore.explain("qr", (3,))
    assert metalcore.explain("rms_norm", (1, 2**32)).variant == "torch"  # kernels cannot count so many elements
    with on_meta("cuda") as recorder:  # each step has 2^31 threads; on a Mac each would take too long
        metalcore.silu(torch.empty(2**18, 2**18, device="meta"))
    assert len(recorder.recording.dispatches) == 8
    plan = metalcore.explain("softmax", (3,), dtype=torch.float64)
    assert (plan.variant, plan.kernels, plan.by_torch) == ("torch", (), ("aten::_softmax",))
    assert str(plan) == "softmax: torch (it is left to PyTorch)\n  aten::_softmax: PyTorch's"


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda: metalcore.explain("qr", (3, 3), made="r"),
            TypeError,
            "qr has no argument 'made'; it has mode, out, backward",
        ),
        (lambda: metalcore.explain("silu", (3, 3), dim=1), TypeError, "silu has no argument 'dim'; it has backward"),
        (lambda: metalcore.explain("softmax", (3, 3), dim="x"), ValueError, "softmax does not take these arguments"),
        (lambda: metalcore.explain("softmax", 3), TypeError, "a tensor or a shape, such as .*, not 3"),
        (lambda: metalcore.explain("softmax", (3.0,)), TypeError, "a tensor or a shape"),
        (lambda: metalcore.explain("softmax", (3, -1)), ValueError, "negative size"),
        (lambda: metalcore.explain("softmax", (3,), dtype="float32"), TypeError, "dtype must be a torch.dtype"),
        (lambda: metalcore.explain("sofmax", (3,)), ValueError, "no op 'sofmax'; it knows adamw, adamw8bit, adamwfp8,"),
        (lambda: metalcore.explain(metalcore.qr, (3, 3)), TypeError, "op must be a name"),
    ],
)
def test_bad_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("op", OPS)
def test_backward_is_another_plan(op):
    with tuned("baseline"):
        weight = [(4096,)] * op.endswith("rms_norm")
        shapes = [(999, 4096)] * (2 if op == "add_rms_norm" else 1)
        plan = metalcore.explain(op, *shapes, *weight, backward=True)
    if op.endswith("rms_norm"):
        assert plan.kernels == ("rms_norm_backward_block1_aligned_float", "column_sums_thread_float")
        assert "(at most 4096)" in plan.why
    else:
        assert plan.kernels == (f"{op}_backward_block4_float",)


@pytest.mark.parametrize(
    "length, kernels, limit",
    [
        (4097, ["rms_norm_backward_block2_half", "column_sums_thread_half"], "at most 8192"),
        (
            8193,
            ["rms_norm_backward_split_sums_half", "rms_norm_backward_split_half", "column_sums_thread_half"],
            "3 threadgroups share a row of 8193",
        ),
    ],
)
def test_rms_norm_backward_with_its_weight(length, kernels, limit):
    with tuned("baseline"):
        plan = metalcore.explain("rms_norm", (999, length), (length,), dtype=torch.float16, backward=True)
    assert list(plan.kernels) == kernels and limit in plan.why


def test_arguments_that_do_not_matter_are_taken():
    text = str(metalcore.explain("rms_norm", (8, 4, 64), normalized_shape=(4, 64), eps=1e-6, weight=None))
    assert text == str(metalcore.explain("rms_norm", (8, 256)))
    metalcore.explain("adamw", (3,), lr=1e-4, betas=(0.9, 0.99))
