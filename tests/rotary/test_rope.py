"""rope, against rotations by complex numbers in float64."""

import pytest
import torch
from references import DTYPES, assert_near, check_operator, tensor, wide

import metalcore

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def tables(*shape, dtype=torch.float32, device="cpu", interleaved=None):
    """cos and sin of random angles, each once, or twice as what multiplies q has them."""
    angles = torch.rand(shape) * 6
    if interleaved is not None:
        angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
    return [table.to(dtype).to(device) for table in (angles.cos(), angles.sin())]


def rotated(x, cos, sin, interleaved=False):
    """x, (batch, heads, tokens, size), by the angles of each pair, (batch or 1, tokens, pairs)."""
    factor = torch.complex(wide(cos), wide(sin)).unsqueeze(1)
    pairs = factor.shape[-1]
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else (turned[..., :pairs], turned[..., pairs:])
    product = torch.complex(a, b) * factor
    parts = (product.real, product.imag)
    turned = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat([turned, rest], -1)


def check(q, k, cos, sin, angles, *arguments, interleaved=False, **options):
    """Compares results and gradients, out of place and in place. `angles` are (cos, sin) of each pair."""
    leaves, wide_leaves = [[f(t).detach().requires_grad_() for t in (q, k)] for f in (lambda t: t, wide)]
    expected = [rotated(x, *angles, interleaved) for x in wide_leaves]
    grads = [tensor(*x.shape, dtype=x.dtype, device=x.device) for x in (q, k)]
    wanted = torch.autograd.grad(expected, wide_leaves, [wide(g) for g in grads])
    for inplace in (False, True):
        copies = [x * 1 for x in leaves]
        found = metalcore.rope(*copies, cos, sin, *arguments, interleaved=interleaved, inplace=inplace, **options)
        assert (found[0].data_ptr() == copies[0].data_ptr()) == inplace
        gradients = torch.autograd.grad(found, leaves, grads)
        for actual, value in zip((*found, *gradients), (*expected, *wanted)):
            assert_near(actual, value.detach(), terms=2)


# Heads that are whole vectors of 16 bytes and not, and numbers of heads that are no multiple of those of a thread.
@each_dtype
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("size", [2, 6, 16, 64])
def test_sizes(device, dtype, interleaved, size):
    q, k = (tensor(2, heads, 3, size, dtype=dtype, device=device) for heads in (5, 1))
    for batch in (1, 2):
        for double in (None, interleaved):
            cos, sin = tables(batch, 3, size // 2, dtype=dtype, device=device, interleaved=double)
            once = slice(None) if double is None else slice(None, None, 2) if interleaved else slice(size // 2)
            angles = cos[..., once], sin[..., once]
            check(q, k, cos, sin, angles, interleaved=interleaved, rotary_dim=size)


@each_dtype
def test_tables_of_float32(device, dtype):
    q, k = (tensor(1, heads, 3, 32, dtype=dtype, device=device) for heads in (4, 2))
    cos, sin = tables(3, 16, device=device)
    check(q, k, cos, sin, (cos[None], sin[None]), rotary_dim=32)


@each_dtype
@pytest.mark.parametrize("size, rotary", [(64, 32), (20, 6), (8, 8)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_partial_dimensions(device, dtype, size, rotary, interleaved):
    q, k = (tensor(2, heads, 3, size, dtype=dtype, device=device) for heads in (2, 2))
    cos, sin = tables(3, rotary // 2, dtype=dtype, device=device)
    check(q, k, cos, sin, (cos[None], sin[None]), interleaved=interleaved, rotary_dim=rotary)


def test_layouts(device):
    """Views of (batch, tokens, heads, size), of parts of one projection, with gaps, and with elements apart."""
    cos, sin = tables(4, 16, device=device)
    angles = cos[None], sin[None]
    projection = tensor(2, 4, 9 * 32, device=device).view(2, 4, 9, 32)
    for q, k in (
        (projection[:, :, :6].transpose(1, 2), projection[:, :, 6:8].transpose(1, 2)),
        (tensor(2, 6, 4, 64, device=device)[..., :32], tensor(2 * 3 * 4 * 32 + 1, device=device)[1:].view(2, 3, 4, 32)),
        (tensor(2, 6, 32, 4, device=device).mT, tensor(2, 6, 4, 64, device=device)[..., ::2]),
        (tensor(2, 1, 4, 32, device=device).expand(2, 6, 4, 32), tensor(2, 0, 4, 32, device=device)),
    ):
        found = metalcore.rope(q, k, cos, sin, rotary_dim=32)
        if q.transpose(1, 2).is_contiguous():
            assert found[0].stride() == q.stride()
        for x, y in zip((q, k), found):
            assert_near(y, rotated(wide(x), *angles), terms=2)
    heads_last = projection[:, :, :6]
    found = metalcore.rope(heads_last, heads_last, cos, sin, unsqueeze_dim=2, rotary_dim=32)[0]
    assert_near(found, rotated(wide(heads_last).transpose(1, 2), *angles).transpose(1, 2), terms=2)


def test_in_place_of_views(device):
    """A view of a tensor that needs a gradient, and elements of a head that lie apart."""
    cos, sin = tables(4, 4, device=device)
    x = tensor(2, 4, 3, 8, device=device).requires_grad_()
    heads = (x * 1).transpose(1, 2)
    rotated_q, _ = metalcore.rope(heads, heads.detach().clone(), cos, sin, rotary_dim=8, inplace=True)
    (gradient,) = torch.autograd.grad(rotated_q.sum(), x)
    back = rotated(torch.ones(2, 3, 4, 8, dtype=torch.float64), cos[None], -sin[None])
    assert_near(gradient, back.transpose(1, 2), terms=2)
    apart = tensor(2, 3, 8, 4, device=device).mT
    expected = rotated(wide(apart), cos[None], sin[None])
    with torch.no_grad():
        metalcore.rope(apart, apart.clone(), cos, sin, rotary_dim=8, inplace=True)
    assert_near(apart, expected, terms=2)


def test_overwriting_what_a_graph_saved(device):
    cos, sin = tables(4, 4, device=device)
    q, k = tensor(2, 3, 4, 8, device=device), tensor(2, 1, 4, 8, device=device)
    for saved in (q, k):
        product = saved * torch.ones(8, device=device, requires_grad=True)
        metalcore.rope(q, k, cos, sin, rotary_dim=8, inplace=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


@pytest.mark.parametrize("size", [6, 32])
def test_positions(device, size):
    q, k = (tensor(2, heads, 3, size, device=device) for heads in (3, 1))
    cos, sin = tables(7, size // 2, device=device)
    for positions in (torch.tensor([6, 0, 2]), torch.tensor([[0, 1, 2], [5, -1, 3]])):
        angles = [table.cpu()[positions].reshape(-1, 3, size // 2) for table in (cos, sin)]
        check(q, k, cos, sin, angles, positions.to(device), rotary_dim=size)


def test_positions_that_the_tables_do_not_have(device):
    q = tensor(1, 1, 4, 32, device=device)
    cos, sin = tables(7, 16, device=device)
    for where in (q, q.cpu()):
        positions = torch.tensor([7, 6, -8, -7], device=where.device)
        found, _ = metalcore.rope(where, where, cos.to(where), sin.to(where), positions, rotary_dim=32)
        assert found.isnan().flatten(-1).all(-1).tolist() == [[[True, False, True, False]]]


@pytest.mark.parametrize("sections", [(4, 6, 6), (3, 6, 7), (0, 16, 0), (0, 0, 16), (16, 0, 0)])
def test_sections(device, sections):
    q, k = (tensor(2, heads, 3, 32, device=device) for heads in (3, 1))
    parts = torch.tensor([0, 1, 2]).repeat_interleave(torch.tensor(sections))

    def choose(table):  # the table of each pair's section, from (3, batch or 1, tokens, pairs)
        return torch.stack([table[part, ..., i] for i, part in enumerate(parts)], -1)

    for batch in (1, 2):
        cos, sin = tables(3, batch, 3, 16, device=device, interleaved=False)
        angles = [choose(table.cpu()[..., :16]) for table in (cos, sin)]
        check(q, k, cos, sin, angles, sections=sections)
    cos, sin = tables(7, 16, device=device)
    positions = torch.randint(7, (3, 2, 3))
    angles = [choose(table.cpu()[positions]) for table in (cos, sin)]
    check(q, k, cos, sin, angles, positions.to(device), sections=sections, rotary_dim=32)


def test_as_in_transformers(device):
    """The formula of Llama's models, in the dtype of q."""

    def rotate_half(x):
        return torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1)

    q, k = tensor(2, 4, 3, 32, device=device), tensor(2, 2, 3, 32, device=device)
    cos, sin = tables(2, 3, 16, device=device, interleaved=False)
    for x, y in zip((q, k), metalcore.rope(q, k, cos, sin)):
        expected = wide(x) * wide(cos).unsqueeze(1) + rotate_half(wide(x)) * wide(sin).unsqueeze(1)
        assert_near(y, expected, terms=2)


def test_gradients_of_tables_and_of_gradients(device):
    q, k = (tensor(1, 2, 3, 8, device=device).requires_grad_() for _ in "qk")
    cos, sin = (table.requires_grad_() for table in tables(3, 4, device=device))
    found = torch.autograd.grad(metalcore.rope(q, k, cos, sin, rotary_dim=8)[0].sum(), (cos, sin))
    x = wide(q)
    assert_near(found[0], (x[..., :4] + x[..., 4:]).sum((0, 1)), terms=4)
    assert_near(found[1], (x[..., :4] - x[..., 4:]).sum((0, 1)), terms=4)
    out = torch.ops.metalcore.rope(q, k, cos[None, None], sin[None, None], None, 1, 8, False, 0, 0, False)[0]
    with pytest.raises(RuntimeError, match="metalcore::rope has no derivative by cos and sin"):
        out.sum().backward()


def test_double_backward(device):
    """The gradient is linear in the result's gradient, and its derivative is the rotation itself."""
    q, grad, direction = (tensor(1, 2, 3, 8, device=device).requires_grad_() for _ in "qgd")
    cos, sin = tables(3, 4, device=device)
    y = metalcore.rope(q, q.detach(), cos, sin, rotary_dim=8)[0]
    (first,) = torch.autograd.grad(y, q, grad, create_graph=True)
    assert_near(first.detach(), rotated(wide(grad), cos[None], -sin[None]), terms=2)
    (second,) = torch.autograd.grad(first, grad, direction)
    assert_near(second, rotated(wide(direction), cos[None], sin[None]), terms=2)


@pytest.mark.parametrize("place", ["cpu", "device"])
def test_opcheck(device, place):
    device = "cpu" if place == "cpu" else device
    q, k = (tensor(2, heads, 3, 8, device=device).requires_grad_() for heads in (2, 1))
    cos, sin = tables(1, 1, 3, 4, device=device)
    options = (None, 1, 8, False, 0, 0, False)
    check_operator(torch.ops.metalcore.rope, q, k, cos, sin, *options)
    check_operator(torch.ops.metalcore.rope, q, None, cos, sin, *options)
    check_operator(torch.ops.metalcore.rope_, q.detach(), k.detach(), cos, sin, *options)


def test_empty(device):
    cos, sin = tables(3, 4, device=device)
    for shape in ((0, 2, 3, 8), (1, 0, 3, 8)):
        x = tensor(*shape, device=device)
        assert metalcore.rope(x, x, cos, sin, rotary_dim=8)[0].shape == shape


def test_bad_input(device):
    q = tensor(1, 2, 3, 8, device=device)
    cos, sin = tables(3, 8, device=device)

    def refused(match, *arguments, **options):
        with pytest.raises(ValueError, match="metalcore.rope: " + match):
            metalcore.rope(*arguments, **options)

    refused("q must have 4 dimensions", q[0], q[0], cos, sin)
    refused(r"k is \[1, 2, 4, 8\], which does not go with q", q, tensor(1, 2, 4, 8, device=device), cos, sin)
    refused(r"cos is \[3, 8\], and sin is \[2, 8\]", q, q, cos, sin[1:])
    refused("cos has 4 columns, half of a head's 8: give rotary_dim=8 if", q, q, *tables(3, 4, device=device))
    refused("rotary_dim must be even and from 2 to 8, not 10", q, q, cos, sin, rotary_dim=10)
    refused("cos must have 4 or 2 columns, not 8", q, q, cos, sin, rotary_dim=4)
    refused(r"cos and sin of \[2, 8\] do not go with 1 x 3 tokens", q, q, cos[1:], sin[1:])
    refused("sections must be three numbers that add up to 4", q, q, cos, sin, sections=(1, 2))
    refused("unsqueeze_dim must be 1 or 2, not 3", q, q, cos, sin, None, 3)
    refused("with position_ids cos must have 2 dimensions", q, q, cos[None], sin[None], torch.arange(3))
    op = torch.ops.metalcore.rope
    with pytest.raises(RuntimeError, match="metalcore::rope: cos must have 8 or 4 columns, not 3"):
        op(q, q, *tables(1, 1, 3, 3, device=device), None, 1, 8, False, 0, 0, False)
    with pytest.raises(RuntimeError, match="positions must be int64, not float32"):
        op(q, q, cos, sin, cos[None], 1, 8, False, 0, 0, False)
