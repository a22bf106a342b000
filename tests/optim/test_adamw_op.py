"""The operator torch.ops.metalcore.adamw_: bad input, opcheck, explain, and the simulator's checking mode."""

import pytest
import torch
from adamw_cases import Pair, random_values
from rows import FAMILIES, tuned

import metalcore

HYPER = dict(lr=1e-2, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8, maximize=False)


def lists(device, shapes=((4, 3), (7,)), dtype=torch.float32, amsgrad=False, capturable=False, narrow=False):
    """Arguments of the operator. With `narrow`, the moments have the parameters' dtype."""

    def moments():
        return [torch.zeros(shape, device=device, dtype=dtype if narrow else torch.float32) for shape in shapes]

    params = [v.to(device=device, dtype=dtype) for v in random_values(*shapes)]
    grads = [v.to(device=device, dtype=dtype) for v in random_values(*shapes, seed=1)]
    steps = [torch.zeros((), device=device if capturable else "cpu") for _ in shapes]
    return [params, grads, moments(), moments(), moments() if amsgrad else [], steps]


@pytest.mark.parametrize(
    "options",
    [{}, {"amsgrad": True}, {"capturable": True}, {"dtype": torch.bfloat16}, {"dtype": torch.bfloat16, "narrow": True}],
)
@pytest.mark.parametrize("at", ["device", "cpu"])
def test_opcheck(device, at, options):
    arguments = lists(device if at == "device" else "cpu", **options)
    torch.library.opcheck(torch.ops.metalcore.adamw_.default, tuple(arguments), HYPER)


KINDS = [
    (torch.float32, False),
    (torch.bfloat16, False),
    (torch.float16, False),
    (torch.bfloat16, True),
    (torch.float16, True),
]  # the dtype of parameters, and whether the moments have it too


@pytest.mark.parametrize("dtype, narrow", KINDS)
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_cpu_kernel_is_the_same_function(device, dtype, narrow, amsgrad, scaled):
    ours = lists(device, dtype=dtype, amsgrad=amsgrad, capturable=True, narrow=narrow)
    theirs = lists("cpu", dtype=dtype, amsgrad=amsgrad, capturable=True, narrow=narrow)
    for _ in range(3):
        for arguments, at in ((ours, device), (theirs, "cpu")):
            extra = {}
            if scaled:
                extra = {
                    name: torch.tensor(v, device=at)
                    for name, v in (("lr_tensor", 2e-2), ("grad_scale", 4.0), ("found_inf", 0.0))
                }
            torch.ops.metalcore.adamw_(*arguments, **HYPER, **extra)
    for some, others in zip(ours, theirs):
        for a, b in zip(some, others):
            # float32 results may differ in the last digits, which can move a rounding to 16 bits to its neighbour, and
            # with narrow moments that moves the parameter in the steps after it.
            eps = torch.finfo(a.dtype).eps
            torch.testing.assert_close(
                a.cpu(), b, rtol=max(1e-6, 1.01 * eps), atol=HYPER["lr"] * eps if narrow else 1e-8
            )


# Vectors of four, where all arrays begin at multiples of them; chunks of 2,048 elements, or of 512 where there are
# few elements.
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype, narrow", KINDS)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_sizes_and_addresses(device, family, dtype, narrow, amsgrad):
    sizes = (1, 3, 4, 5, 127, 128, 129, 255, 256, 257, 511, 512, 513, 2047, 2048, 2049, 4097)
    results = []
    for at in (device, "cpu"):
        for offset in (0, 1):
            arguments = lists(at, [(size + offset,) for size in sizes], dtype, amsgrad, narrow=narrow)
            for tensors in arguments[:-1]:
                tensors[:] = [tensor[offset:] for tensor in tensors]
            with tuned(family):
                torch.ops.metalcore.adamw_(*arguments, **HYPER)
            results.append(arguments)
    for ours, theirs in zip(results[:2], results[2:]):
        for some, others in zip(ours, theirs):
            for a, b in zip(some, others):
                torch.testing.assert_close(a.cpu(), b, rtol=max(1e-6, 1.01 * torch.finfo(a.dtype).eps), atol=1e-8)


# All of a call's steps need not be the same, nor its parameters contiguous.
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_steps_and_layouts_of_their_own(device, amsgrad, capturable):
    shapes = ((4, 3), (0,), (5, 4), (2, 6), (7,), (3, 3))
    results = []
    for at in (device, "cpu"):
        arguments = lists(at, shapes, amsgrad=amsgrad, capturable=capturable)
        for tensors in arguments[:-1]:
            tensors[2:4] = [tensors[2].mT, tensors[3][:, ::2]] if tensors else []
        for step, value in zip(arguments[-1], (1, 9, 1, 1, 5, 1)):
            step.fill_(value)
        torch.ops.metalcore.adamw_(*arguments, **HYPER)
        results.append(arguments)
    for some, others in zip(*results):
        for a, b in zip(some, others):
            torch.testing.assert_close(a.cpu(), b, rtol=1e-6, atol=1e-8)


def test_found_inf_changes_nothing(device):
    for at in (device, "cpu"):
        arguments = lists(at, capturable=True, amsgrad=True)
        before = [[t.clone() for t in some] for some in arguments]
        torch.ops.metalcore.adamw_(
            *arguments, **HYPER, found_inf=torch.ones((), device=at), grad_scale=torch.full((), 2.0, device=at)
        )
        for some, others in zip(arguments, before):
            assert all(torch.equal(a, b) for a, b in zip(some, others))


def test_no_parameters(device):
    torch.ops.metalcore.adamw_(
        [torch.empty(0, device=device)],
        [torch.empty(0, device=device)],
        [torch.empty(0, device=device)],
        [torch.empty(0, device=device)],
        [],
        [torch.zeros(())],
        **HYPER,
    )


PARAMS, GRADS, EXP_AVGS, EXP_AVG_SQS, MAX_EXP_AVG_SQS, STEPS = range(6)


@pytest.mark.parametrize(
    "which, change, text",
    [
        (PARAMS, lambda t: t.to(torch.int64), "params must be float32, float16 or bfloat16"),
        (PARAMS, lambda t: t.to(torch.complex64), "params must be float32, float16 or bfloat16"),
        (GRADS, lambda t: t.to(torch.float16), "grads must be float32, not float16"),
        (GRADS, lambda t: t.reshape(-1)[:2], "grads must have shape"),
        (GRADS, lambda t: t.cpu(), "grads must be on the device"),
        (EXP_AVGS, lambda t: t.to(torch.bfloat16), "exp_avg_sqs must be bfloat16, not float32"),
        (EXP_AVGS, lambda t: t.cpu(), "exp_avgs must be on the device"),
        (EXP_AVG_SQS, lambda t: t[:1], "exp_avg_sqs must have shape"),
        (EXP_AVG_SQS, lambda t: t.new_zeros(()).expand(t.shape), "exp_avg_sqs is to be written"),
        (MAX_EXP_AVG_SQS, lambda t: t.to(torch.float16), "max_exp_avg_sqs must be float32"),
        (STEPS, lambda t: torch.zeros(2), "a step must have one element"),
        (STEPS, lambda t: torch.zeros((), dtype=torch.bool), "a step must be a float or an integer, not bool"),
    ],
)
def test_bad_tensors(device, which, change, text):
    arguments = lists(device, amsgrad=True)
    before = [[t.clone() for t in some] for some in arguments]
    given = [list(some) for some in arguments]
    given[which] = [change(t) for t in given[which]]
    with pytest.raises(RuntimeError, match=text):
        torch.ops.metalcore.adamw_(*given, **HYPER)
    for some, others in zip(arguments, before):
        assert all(torch.equal(a, b) for a, b in zip(some, others))


@pytest.mark.parametrize("which", range(6))
def test_lists_of_different_lengths(device, which):
    arguments = lists(device, amsgrad=True)
    arguments[which] = arguments[which][:1]
    with pytest.raises(RuntimeError, match="has [12] tensors, params [12]"):
        torch.ops.metalcore.adamw_(*arguments, **HYPER)


def test_moments_of_two_dtypes(device):
    arguments = lists(device, dtype=torch.bfloat16, narrow=True)
    arguments[EXP_AVG_SQS] = [t.float() for t in arguments[EXP_AVG_SQS]]
    with pytest.raises(RuntimeError, match="exp_avg_sqs must be bfloat16, not float32"):
        torch.ops.metalcore.adamw_(*arguments, **HYPER)


def test_narrow_moments_give_the_numbers_of_pytorchs_fused_step(device):
    """PyTorch's fused step computes in float32 too and rounds stored values; its other steps round every operation."""
    ours = lists(device, dtype=torch.bfloat16, capturable=True, narrow=True)
    theirs = lists("cpu", dtype=torch.bfloat16, capturable=True, narrow=True)
    for _ in range(3):
        torch.ops.metalcore.adamw_(*ours, **HYPER)
        for step in theirs[STEPS]:
            step += 1
        torch._fused_adamw_(*theirs, **HYPER, amsgrad=False)
    for some, others in zip(ours[:4], theirs[:4]):
        for a, b in zip(some, others):
            torch.testing.assert_close(a.cpu(), b, rtol=2**-7, atol=1e-2 * 2**-7)


def test_mixed_dtypes(device):
    arguments = lists(device)
    arguments[PARAMS][1] = arguments[PARAMS][1].half()
    with pytest.raises(RuntimeError, match="params must be float32, not float16"):
        torch.ops.metalcore.adamw_(*arguments, **HYPER)


def test_steps_on_both_sides(device):
    arguments = lists(device)
    for order in (1, -1):
        arguments[STEPS] = [torch.zeros(()), torch.zeros((), device=device)][::order]
        with pytest.raises(RuntimeError, match="on the CPU"):
            torch.ops.metalcore.adamw_(*arguments, **HYPER)


@pytest.mark.parametrize("name", ["lr_tensor", "grad_scale", "found_inf"])
def test_bad_device_scalars(device, name):
    with pytest.raises(RuntimeError, match="need state_steps on the device"):
        torch.ops.metalcore.adamw_(*lists(device), **HYPER, **{name: torch.ones((), device=device)})
    for value in (torch.ones(2, device=device), torch.ones((), device=device, dtype=torch.float16), torch.ones(())):
        with pytest.raises(RuntimeError, match=name):
            torch.ops.metalcore.adamw_(*lists(device, capturable=True), **HYPER, **{name: value})


def test_bad_betas(device):
    for name in ("beta1", "beta2"):
        with pytest.raises(RuntimeError, match="betas"):
            torch.ops.metalcore.adamw_(*lists(device), **(HYPER | {name: 1.0}))


def test_explain():
    text = str(metalcore.explain("adamw", *[(3,)] * 103, (5000,), (0,), amsgrad=True))
    assert "adamw_amsgrad_float" in text and "104 parameters" in text
    assert "adamw_scalars" in str(metalcore.explain("adamw", (3,), capturable=True))


@pytest.mark.only_on("simulator")
@pytest.mark.parametrize("options", [{}, {"amsgrad": True, "fused": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checking_mode_is_clean(device, options, dtype):
    with metalcore.simulator.checking():
        if dtype == torch.bfloat16:
            torch.ops.metalcore.adamw_(
                *lists(device, ((2049,), (5,)), dtype, "amsgrad" in options, narrow=True), **HYPER
            )
        pair = Pair(
            random_values((2049,), (5,), (3, 7), (0,), *[(1 + i % 5,) for i in range(105)]),
            device,
            options,
            dtype=dtype,
            lr=1e-2,
            amsgrad=options.get("amsgrad", False),
        )
        pair.steps(1)
    if dtype == torch.float32:
        pair.assert_equal(steps=1)
