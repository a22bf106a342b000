"""metalcore.optim.AdamW's results against torch.optim.AdamW's on the CPU in float32."""

import itertools

import pytest
import torch
from adamw_cases import EPS, Pair, assert_steps_close, random_values
from references import smallest

import metalcore

CHUNK = 2048  # threads / 32 * strips * OPTIM_STRIP of the tuning table "optim"
PER_DISPATCH = 102  # 512 pointers, 5 for each parameter
OPTIONS = list(itertools.product([False, True], [False, True], [0.0, 0.1]))


@pytest.mark.parametrize("amsgrad, maximize, weight_decay", OPTIONS)
def test_twenty_steps(device, amsgrad, maximize, weight_decay):
    pair = Pair(
        random_values((33, 7), (5,), ()), device, lr=1e-2, amsgrad=amsgrad, maximize=maximize, weight_decay=weight_decay
    )
    pair.steps(20)
    pair.assert_equal()


@pytest.mark.parametrize("ours", [{"capturable": True}, {"fused": True}])
@pytest.mark.parametrize("amsgrad, maximize, weight_decay", OPTIONS)
def test_twenty_steps_counted_on_the_device(device, ours, amsgrad, maximize, weight_decay):
    pair = Pair(
        random_values((33, 7), (5,), ()),
        device,
        ours,
        lr=1e-2,
        amsgrad=amsgrad,
        maximize=maximize,
        weight_decay=weight_decay,
    )
    pair.steps(20)
    pair.assert_equal()
    assert all(pair.optimizer.state[p]["step"].device.type == torch.device(device).type for p in pair.params)


@pytest.mark.parametrize("betas", [(0.0, 0.0), (0.3, 0.5), (0.5, 0.9), (0.9, 0.95), (0.999, 0.99999)])
@pytest.mark.parametrize("ours", [{}, {"capturable": True}])
@pytest.mark.parametrize("eps", [1e-8, 1e-2])
def test_betas_and_eps(device, ours, betas, eps):
    pair = Pair(random_values((65,)), device, ours, lr=1e-3, betas=betas, eps=eps)
    pair.steps(20)
    pair.assert_equal()


@pytest.mark.parametrize(
    "numel",
    [
        1,
        3,
        4,
        5,
        63,
        64,
        255,
        256,
        257,
        CHUNK - 1,
        CHUNK,
        CHUNK + 1,
        2 * CHUNK - 1,
        2 * CHUNK,
        2 * CHUNK + 1,
        10 * CHUNK + 6,
    ],
)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_sizes(device, numel, amsgrad):
    pair = Pair(random_values((numel,)), device, lr=1e-2, amsgrad=amsgrad)
    pair.steps(3)
    pair.assert_equal(steps=3)


@pytest.mark.parametrize("count", [PER_DISPATCH - 1, PER_DISPATCH, PER_DISPATCH + 1, 2 * PER_DISPATCH + 1])
@pytest.mark.parametrize("ours", [{}, {"capturable": True}])
def test_more_parameters_than_a_dispatch_takes(device, count, ours):
    pair = Pair(random_values(*[(1 + i % 9,) for i in range(count)]), device, ours, lr=1e-2)
    pair.steps(3)
    pair.assert_equal(steps=3)


def test_a_thousand_small_parameters_and_a_big_one(device):
    shapes = [(1 + i % 37,) for i in range(500)] + [(300, 257)] + [(2, 1 + i % 5) for i in range(500)]
    pair = Pair(random_values(*shapes), device, {"capturable": True}, lr=1e-2)
    pair.steps(2)
    pair.assert_equal(steps=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("numel", [5, 64, CHUNK + 3])
def test_16_bit_parameters_have_float32_moments(device, dtype, amsgrad, numel):
    """A step is the float32 step from the rounded parameter, rounded once."""
    pair = Pair(random_values((numel,)), device, dtype=dtype, lr=1e-1, amsgrad=amsgrad, weight_decay=0.1)
    for _ in range(5):
        pair.steps(1)
        for p, e in zip(pair.params, pair.expected):
            state = pair.optimizer.state[p]
            assert p.dtype == dtype and all(state[name].dtype == torch.float32 for name in state)
            # The bound is half an ulp, for the rounding, and float32's errors, which may carry a value over the middle.
            torch.testing.assert_close(
                p.detach().cpu().float(),
                e.detach(),
                rtol=0.5 * torch.finfo(dtype).eps + 8 * EPS,
                atol=smallest(dtype) + 8 * EPS * 0.1,
            )
            e.data.copy_(p.detach())
    for p, e in zip(pair.params, pair.expected):
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(
                pair.optimizer.state[p][name].cpu(), pair.reference.state[e][name], rtol=1e-6, atol=5 * EPS
            )


def test_mixed_dtypes_and_devices_in_one_group(device):
    values = random_values((40,), (3, 5), (6,), (7,), (8,), (2, 2))
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float32, torch.complex64]
    places = [device, device, device, "cpu", "cpu", device]
    params = [torch.nn.Parameter(v.to(device=d, dtype=t)) for v, d, t in zip(values, places, dtypes)]
    expected = [torch.nn.Parameter(p.detach().cpu()) for p in params]
    optimizer = metalcore.optim.AdamW(params, lr=1e-2)
    reference = torch.optim.AdamW(expected, lr=1e-2)
    for step in range(3):
        for p, e, g in zip(params, expected, random_values(*[v.shape for v in values], seed=step)):
            e.grad = g.to(e.dtype)
            p.grad = e.grad.to(p.device)
        optimizer.step()
        reference.step()
    for p, e in zip(params, expected):
        # In 16 bits the reference rounds after each of its operations, which differ by up to a few ulps.
        wide = torch.finfo(p.dtype).eps < 1e-6
        torch.testing.assert_close(
            p.detach().cpu(),
            e.detach(),
            rtol=1e-6 if wide else 16 * torch.finfo(p.dtype).eps,
            atol=3 * 8 * EPS * 1e-2 if wide else 1e-3,
        )


def layouts(device):
    """Parameters (and gradients) of shape (6, 10), each in a different layout."""

    def base(*shape):
        return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)

    yield "transposed", base(10, 6).t()
    yield "columns", base(6, 20)[:, ::2]
    yield "rows", base(12, 10)[1::2]
    yield "offset", base(100)[7:67].view(6, 10)
    yield "offset by 4 elements", base(100)[4:64].view(6, 10)
    yield "permuted", base(2, 6, 5).permute(1, 0, 2).reshape(6, 10)


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("ours", [{}, {"capturable": True}])
def test_layouts(device, amsgrad, ours):
    for (name, value), (grad_name, grad) in itertools.product(layouts(device), layouts(device)):
        p = torch.nn.Parameter(value)
        assert p.data_ptr() == value.data_ptr()
        e = torch.nn.Parameter(value.cpu().clone())
        optimizer = metalcore.optim.AdamW([p], lr=1e-2, amsgrad=amsgrad, **ours)
        reference = torch.optim.AdamW([e], lr=1e-2, amsgrad=amsgrad)
        p.grad, e.grad = grad, grad.cpu()
        for _ in range(3):
            optimizer.step()
            reference.step()
        assert_steps_close(value, e, 3, 1e-2)  # the memory that the parameter was made of
        assert torch.equal(p.detach(), value), (name, grad_name)


def test_only_the_elements_of_a_view_change(device):
    base = torch.arange(200.0, device=device)
    before = base.cpu().clone()
    p = torch.nn.Parameter(base[3:103].view(10, 10)[:, 2:9])
    p.grad = torch.ones_like(p)
    metalcore.optim.AdamW([p], lr=0.5).step()
    inside = torch.zeros(200, dtype=torch.bool)
    inside[3:103].view(10, 10)[:, 2:9] = True
    after = base.cpu()
    assert torch.equal(after[~inside], before[~inside])
    assert (after[inside] != before[inside]).all()


def test_expanded_gradient(device):
    pair = Pair(random_values((5, 6)), device, lr=1e-2)
    pair.params[0].grad = torch.ones((), device=device).expand(5, 6)
    pair.expected[0].grad = torch.ones(5, 6)
    pair.optimizer.step()
    pair.reference.step()
    pair.assert_equal(steps=1)


def test_expanded_parameter_is_refused_unchanged(device):
    p = torch.nn.Parameter(torch.ones(3, 1, device=device).expand(3, 4))
    p.grad = torch.ones(3, 4, device=device)
    with pytest.raises(RuntimeError, match="expanded"):
        metalcore.optim.AdamW([p]).step()
    assert torch.equal(p.detach().cpu(), torch.ones(3, 4))


@pytest.mark.parametrize("ours", [{}, {"capturable": True}])
def test_parameters_that_share_memory_are_updated_in_turn(device, ours):
    base = random_values((50,))[0]
    shared, expected = base.to(device), base.clone()

    def views(tensor):
        return [torch.nn.Parameter(tensor[0:30]), torch.nn.Parameter(tensor[20:50]), torch.nn.Parameter(tensor[0:50:2])]

    params, others = views(shared), views(expected)
    optimizer = metalcore.optim.AdamW(params, lr=1e-1, **ours)
    reference = torch.optim.AdamW(others, lr=1e-1, foreach=False)
    for step in range(3):
        for p, o, g in zip(params, others, random_values((30,), (30,), (25,), seed=step)):
            p.grad, o.grad = g.to(device), g
        optimizer.step()
        reference.step()
    assert_steps_close(shared, expected, 9, 1e-1)


@pytest.mark.parametrize("ours", [{}, {"capturable": True}])
def test_empty_and_gradless_parameters(device, ours):
    values = random_values((4, 3), (0, 5), (6,))
    pair = Pair(values, device, ours, lr=1e-2)
    frozen = torch.nn.Parameter(torch.ones(3, device=device))
    pair.optimizer.add_param_group({"params": [frozen]})
    pair.steps(3)
    pair.assert_equal(steps=3)
    assert torch.equal(frozen.detach().cpu(), torch.ones(3)) and frozen not in pair.optimizer.state
    assert float(pair.optimizer.state[pair.params[1]]["step"]) == 3


def test_only_empty_parameters(device):
    p = torch.nn.Parameter(torch.empty(0, 3, device=device))
    p.grad = torch.empty_like(p)
    for options in ({}, {"capturable": True}):
        optimizer = metalcore.optim.AdamW([p], **options)
        optimizer.step()
        assert float(optimizer.state[p]["step"]) == 1


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_spoils_its_element_only(device, bad, amsgrad):
    pair = Pair(random_values((20,)), device, lr=1e-2, amsgrad=amsgrad)
    for _ in range(3):
        pair.set_grads()
        pair.params[0].grad[11] = bad
        pair.expected[0].grad[11] = bad
        pair.optimizer.step()
        pair.reference.step()
    p, e = pair.params[0].detach().cpu(), pair.expected[0].detach()
    assert torch.equal(p.isfinite(), e.isfinite())
    torch.testing.assert_close(p, e, equal_nan=True, rtol=1e-6, atol=3 * 8 * EPS * 1e-2)


def test_training_a_model(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    twin = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    twin.load_state_dict(model.state_dict())
    model.to(device)
    optimizer = metalcore.optim.AdamW(model.parameters(), lr=1e-3)
    reference = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    x, y = torch.randn(32, 8), torch.randn(32, 4)
    losses, expected = [], []
    for _ in range(20):
        for net, opt, at, record in ((model, optimizer, device, losses), (twin, reference, "cpu", expected)):
            opt.zero_grad()
            loss = torch.nn.functional.mse_loss(net(x.to(at)), y.to(at))
            loss.backward()
            opt.step()
            record.append(loss.item())
    assert losses[-1] < losses[0]
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
    for p, e in zip(model.parameters(), twin.parameters()):
        # The gradients are results of two devices here; where they are small their errors come out in full.
        torch.testing.assert_close(p.detach().cpu(), e.detach(), rtol=1e-6, atol=1e-6)
