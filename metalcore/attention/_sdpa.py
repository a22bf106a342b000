"""scaled_dot_product_attention: PyTorch's, and with windows, softcap, sinks and the logarithms of the sums."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.mac_kernels import attention_kernel
from .._core.operators import needs_gradient
from .._core.registry import Op, Override, Sample, register
from .._core.routing import accelerated, alike, autocast_dtype, converted, is_plain, on_cuda, require_tensors
from .._core.shapes import broadcast_shapes
from ._composite import Options, attend, spread
from ._operators import attention, plain_attention
from ._slopes import bias_of, check_slopes

__all__ = ["scaled_dot_product_attention"]

MOST_HEAD_SIZE = 256
MOST_DECODED = 576, 512  # sizes of keys and values (MLA), where there is no derivative and no dropout
_MOST_LENGTH = 2**30 - 1
_NAME = "metalcore.scaled_dot_product_attention"

_by_torch = F.scaled_dot_product_attention
_AUTOCAST = frozenset(
    device
    for device in ("mps", "cuda")
    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::scaled_dot_product_attention", f"Autocast{device.upper()}")
)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: tuple[int, int] = (-1, -1),
    lower_right: bool = False,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(query keyᵀ scale + attn_mask) value, as torch.nn.functional.scaled_dot_product_attention.

    The kernels keep no scores in memory, in either direction (FlashAttention-2: Dao, 2023), except for the gradient of
    a floating-point attn_mask, which takes some float32 tensors of the scores' size. They sum in float32 and in a fixed
    order, so that the same input gives the same bits. A query that sees no key gives zeros, and zero gradients. The
    biases of alibi_slopes take a number for each head and distance, except for a gradient of theirs.

    Args:
        query: (…, heads, L, E), float32, float16 or bfloat16, with any strides. E and Ev are at most 256, or without
            dropout and gradients 576 and 512 (MLA); larger ones, other dtypes, and tensors on other devices than `mps`
            and `cuda` are computed by PyTorch's ops.
        key: (…, heads, S, E). Dimensions before the last two are broadcast.
        value: (…, heads, S, Ev).
        attn_mask: of a shape that broadcasts to (…, heads, L, S): bool (True where a query sees a key), or numbers of
            query's dtype or float32, which are added to the scores; or torch.nn.attention.bias.causal_lower_right()
            and causal_upper_left().
        dropout_p: the probability with which a weight is dropped, by random numbers (Philox) whose seed is drawn from
            the device's generator.
        is_causal: query i sees keys up to i. There must be no attn_mask then.
        scale: 1 / sqrt(E) by default.
        enable_gqa: query may have a multiple of the heads that key and value have.
        window: (left, right): query i sees keys from i - left to i + right. -1 stands for no limit.
        lower_right: is_causal and window count from the last query and the last key: query i is at i + S - L.
        softcap: a score s becomes softcap * tanh(s / softcap) before masks. 0 stands for none.
        sinks: a logit for each head of query, of any floating-point dtype, that takes its part of the softmax, and has
            no value (gpt-oss).
        alibi_slopes: numbers (heads,) or (batch, heads): the score of query i and key j gets -slope * |i - j|, where
            lower_right moves i as it does for window.
        return_lse: return the logarithms of the softmax's sums, too.

    Returns:
        (…, heads, L, Ev) of query's dtype, whose heads and rows lie in memory as query's do; with return_lse also
        (…, heads, L) in float32, which is -inf where a query sees no key. Both have gradients of any order.

    Raises:
        RuntimeError: shapes, dtypes or devices do not go together.
        TypeError: sinks is no tensor.
        ValueError: dropout_p is above 1 (or negative, together with an option that PyTorch's function lacks), window
            has no two numbers of -1 and more, softcap is negative or not finite, or sinks or alibi_slopes has not one
            number for each head.
    """
    if not _is_typed(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
        return _by_torch(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    plain = attn_mask is None and not dropout_p and sinks is None and window == (-1, -1) and not lower_right
    plain = plain and alibi_slopes is None
    if plain and type(softcap) is float and softcap == 0 and _are_usual(query, key, value, enable_gqa):
        if not return_lse:
            return plain_attention(query, key, value, is_causal, _scale(query, scale))
        options = _options(query, 0.0, -1, 0 if is_causal else -1, False, scale, 0.0)
        return attention(query, key, value, None, None, None, None, None, *options)
    left, right = _window(_NAME, window)
    bias, causal = attn_mask, is_causal
    if attn_mask is not None and type(attn_mask) is not Tensor:
        bias, causal, lower_right = _causal_bias(attn_mask, is_causal, lower_right)
    extended = (left, right) != (-1, -1) or lower_right or bool(softcap) or sinks is not None or return_lse
    extended = extended or alibi_slopes is not None
    inputs = _autocast(query, key, value, bias)
    taken = accelerated(*inputs[:3], sinks, alibi_slopes) and (bias is None or bias.device == query.device)
    problem, tensors = _four_dimensions(*inputs, enable_gqa, causal) if taken or extended else (None, None)  # pyright: ignore[reportCallIssue]
    if tensors is None or dropout_p < 0 or not (taken and takes(*tensors[:3], dropout_p)):  # pyright: ignore[reportCallIssue]
        if not extended:  # errors and odd cases are PyTorch's
            wrong = _wrong_dtypes(*inputs) if taken else None  # pyright: ignore[reportCallIssue]
            if wrong:  # the ops of PyTorch's function would take it on a simulated device
                raise RuntimeError(f"{_NAME}: {wrong}")
            return _by_torch(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if problem:
            raise RuntimeError(f"{_NAME}: {problem}")
        taken = False
    q, k, v, mask = tensors  # pyright: ignore[reportGeneralTypeIssues]
    _check(_NAME, q, dropout_p, softcap, sinks)
    options = _options(q, dropout_p, left, 0 if causal else right, lower_right, scale, softcap)
    if alibi_slopes is not None:
        mask = _with_slopes(q, k, mask, check_slopes(_NAME, alibi_slopes, q.shape[0], q.shape[1], q), options)
    seed = new_seed(q.device) if dropout_p > 0 else None
    if taken:
        out, lse = attention(q, k, v, mask, sinks, None, None, seed, *options)
    else:
        out, lse = attend(q, k, v, mask, sinks, None, None, seed, options)
    out = _as_dimensions(out, *inputs[:3])
    return (out, _as_dimensions(lse.unsqueeze(-1), *inputs[:3]).squeeze(-1)) if return_lse else out


def _with_slopes(q, k, mask, slopes, options):
    rows, columns = q.shape[2], k.shape[2]
    bias = bias_of(slopes, columns - rows if options.lower_right else 0, rows, columns)
    if mask is None:
        return bias
    bias = spread(bias, rows, columns, None, None, options)
    return bias.where(mask, -torch.inf) if mask.dtype == torch.bool else bias + mask


def _is_typed(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    """Whether arguments that PyTorch's function has are of its types. Where they are not, it raises an error."""
    return (
        isinstance(query, Tensor)
        and isinstance(key, Tensor)
        and isinstance(value, Tensor)
        and (attn_mask is None or isinstance(attn_mask, Tensor))
        and isinstance(dropout_p, (int, float))
        and (scale is None or isinstance(scale, (int, float)))
        and type(is_causal) is bool
        and type(enable_gqa) is bool
    )


def _are_usual(query, key, value, enable_gqa):
    """Whether the kernels take these tensors as they are, as in most calls."""
    if not alike(query, key, value) or autocast_dtype(query) is not None:
        return False
    q, k, v = query.shape, key.shape, value.shape
    return (
        _go_together(q, k, v, enable_gqa)
        and q[3] == k[3]
        and k[2] == v[2]
        and 0 < q[3] <= MOST_HEAD_SIZE
        and 0 < v[3] <= MOST_HEAD_SIZE
        and q[2] <= _MOST_LENGTH
        and k[2] <= _MOST_LENGTH
    )


def _options(q, dropout_p, left, right, lower_right, scale, softcap):
    return Options(0, 0, left, right, lower_right, _scale(q, scale), float(softcap), float(dropout_p))


def _scale(q, scale):
    return q.shape[-1] ** -0.5 if scale is None else float(scale)


def _as_dimensions(x, query, key, value):
    """The result of tensors of four dimensions, with the leading dimensions of those that the user gave."""
    if query.dim() == 4:
        return x
    leading = broadcast_shapes(*(tensor.shape[:-3] for tensor in (query, key, value)))
    heads = x.shape[1:2] if max(query.dim(), key.dim(), value.dim()) > 2 else ()
    return x.reshape(*leading, *heads, *x.shape[2:])


def takes(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> bool:
    """Whether there are kernels for accelerated() tensors of these dtypes and sizes."""
    size, value_size = q.shape[-1], v.shape[-1]
    return (
        min(size, value_size) > 0
        and max(q.shape[2], k.shape[2]) <= _MOST_LENGTH
        and (max(size, value_size) <= MOST_HEAD_SIZE or _only_decoded(q, k, v, dropout))
    )


def _only_decoded(q, k, v, dropout):
    fits = q.shape[-1] <= MOST_DECODED[0] and v.shape[-1] <= MOST_DECODED[1]
    return fits and dropout == 0 and not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)))


def new_seed(device: torch.device) -> Tensor:
    """Random numbers for one call's dropout, from the device's generator. They stay on the device, so that a CUDA graph
    draws new ones for each replay."""
    return torch.randint(-(2**31), 2**31 - 1, (2,), dtype=torch.int32, device=device)


def _window(op, window):
    if window == (-1, -1):
        return window
    if not (isinstance(window, (tuple, list)) and len(window) == 2 and all(type(n) is int and n >= -1 for n in window)):
        raise ValueError(f"{op}: window must be two integers of -1 and more, not {window!r}")
    return tuple(min(n, _MOST_LENGTH) for n in window)


def _check(op, q, dropout_p, softcap, sinks):
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"{op}: dropout_p must be in [0, 1], not {dropout_p}")
    if not isinstance(softcap, (int, float)) or not 0 <= softcap < math.inf:
        raise ValueError(f"{op}: softcap must be a finite number that is not negative, not {softcap!r}")
    if sinks is None:
        return
    require_tensors(op, sinks=sinks)
    if sinks.shape != q.shape[1:2]:
        raise ValueError(f"{op}: sinks must have the shape ({q.shape[1]},), not {tuple(sinks.shape)}")
    if sinks.device != q.device:
        raise RuntimeError(f"{op}: sinks must be on query's device, {q.device}, not on {sinks.device}")


def _wrong_dtypes(query, key, value, mask):
    """What is wrong with the dtypes, or None. PyTorch's rules are the same."""
    if not query.dtype == key.dtype == value.dtype:
        return f"query, key and value must have one dtype, not {query.dtype}, {key.dtype} and {value.dtype}"
    if mask is not None and mask.dtype not in (torch.bool, query.dtype, torch.float32):
        return f"attn_mask must be bool, float32 or of query's dtype, not {mask.dtype}"
    return None


def _causal_bias(attn_mask, is_causal, lower_right):
    """torch.nn.attention.bias has tensors that stand for masks."""
    from torch.nn.attention.bias import CausalBias, CausalVariant

    if not isinstance(attn_mask, CausalBias):
        return attn_mask, is_causal, lower_right
    if is_causal:
        raise ValueError(f"{_NAME}: a causal bias and is_causal=True cannot be combined")
    return None, True, attn_mask.variant == CausalVariant.LOWER_RIGHT


def _autocast(*tensors):
    """PyTorch's rule for this op: with autocast on, it computes in autocast's dtype."""
    device = "cuda" if on_cuda(tensors[0]) else "mps"
    if device not in _AUTOCAST or not torch.is_autocast_enabled(device):
        return tensors
    return converted(torch.get_autocast_dtype(device), tensors)


def _four_dimensions(query, key, value, mask, enable_gqa, is_causal):
    """What is wrong with the shapes and dtypes, or None, and the tensors with the dimensions (batch, heads, length,
    size). A mask has 1 in places that are for all."""
    if min(query.dim(), key.dim(), value.dim()) < 2 or query.shape[-1] == 0:
        return "query, key and value must have at least 2 dimensions, and the last one must not be 0", None
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (query, key, value))
        return f"query, key and value of the shapes {shapes} do not go together", None
    if mask is not None and is_causal:
        return "there must be no attn_mask where is_causal is set", None
    wrong = _wrong_dtypes(query, key, value, mask)
    if wrong:
        return wrong, None
    if mask is None and _go_together(query.shape, key.shape, value.shape, enable_gqa):
        return None, (query, key, value, None)
    tensors = [tensor[(None,) * (4 - tensor.dim())] if tensor.dim() < 4 else tensor for tensor in (query, key, value)]
    try:
        leading = broadcast_shapes(*(tensor.shape[:-3] for tensor in tensors))
        heads, of_key, of_value = (tensor.shape[-3] for tensor in tensors)
        grouped = of_key == of_value and (heads % of_key == 0 if of_key else heads == 0)
        if not grouped or not (enable_gqa or of_key in (1, heads)):
            if enable_gqa:
                return f"{heads} heads of query are no multiple of {of_key} of key and {of_value} of value", None
            of_key = of_value = heads = broadcast_shapes((heads,), (of_key,), (of_value,))[0]
        tensors = [
            tensor
            if tensor.shape[:-2] == (*leading, count) and len(leading) == 1
            else tensor.expand(*leading, count, -1, -1).flatten(0, -4)
            for tensor, count in zip(tensors, (heads, of_key, of_value))
        ]
        if mask is not None:
            scores = (*leading, heads, query.shape[-2], key.shape[-2])
            if broadcast_shapes(mask.shape, scores) != scores:
                return f"attn_mask of the shape {tuple(mask.shape)} does not broadcast to {scores}", None
            mask = mask[(None,) * (4 - mask.dim())]
            if mask.dim() > 4 or len(leading) > 1:
                mask = mask.expand(*leading, -1, -1, -1).flatten(0, -4)
    except RuntimeError as error:
        return str(error), None
    return None, (*tensors, mask)


def _go_together(query, key, value, enable_gqa):
    """Whether these are shapes of one batch and of heads that need no expansion, as in most calls."""
    if not len(query) == len(key) == len(value) == 4 or not query[0] == key[0] == value[0] or key[1] != value[1]:
        return False
    return query[1] == key[1] or enable_gqa and key[1] > 0 and query[1] % key[1] == 0


# The override of PyTorch's function. PyTorch takes it apart above the kernels of devices, so it stands where that
# happens.
# On NVIDIA GPUs PyTorch's own kernels are faster.


def _override(previous, count, decline):
    def kernel(
        keyset, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
    ):
        given = query, key, value, attn_mask
        if all(map(is_plain, given)) and accelerated(query, key, value) and 0 <= dropout_p <= 1:
            _, tensors = _four_dimensions(*given, enable_gqa, is_causal)
            if tensors is not None and takes(*tensors[:3], dropout_p):  # pyright: ignore[reportCallIssue]
                q, k, v, mask = tensors
                options = _options(q, dropout_p, -1, 0 if is_causal else -1, False, scale, 0.0)
                seed = new_seed(q.device) if dropout_p > 0 else None
                # PyTorch saves scaled copies of query and key, and neither the mask nor the result; and the value,
                # except where it copies that for 16 bits or groups. Callers may change what is not saved.
                differentiated = any(x is not None and needs_gradient(x) for x in tensors)
                if differentiated:
                    q, k, mask = q.clone(), k.clone(), None if mask is None else mask.clone()
                    v = v if v.dtype is torch.float32 and v.shape[1] == q.shape[1] else v.clone()
                out, _ = count.run(attention, q, k, v, mask, None, None, None, seed, *options)
                return _as_dimensions(out.clone() if differentiated else out, query, key, value)
        return decline(keyset, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    return kernel


def own_calls(release, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
    """Whether a release of PyTorch has a kernel of its own for these arguments on a Mac."""
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    keeps_scores = needs_grad or dropout_p > 0 or attn_mask is not None
    lengths, sizes = (query.shape[-2], key.shape[-2]), (query.shape[-1], value.shape[-1])
    return attention_kernel(release, *lengths, *sizes, is_causal, keeps_scores)


def _sample(name, q, k, v, *more, mask=None, **options):
    """`mask` makes the mask of the tensors' device, and `more` are shapes of a mask or of sinks."""
    arguments = (lambda q, k, v: (q, k, v, mask(q))) if mask else lambda *tensors: tensors
    return Sample(name, (q, k, v, *more), options, arguments=arguments, terms=max(k[-2], q[-1]), roundings=4)


def _checkered(q):
    """Queries that see some of 50 keys, and one that sees none."""
    seen = (torch.arange(40, device=q.device).unsqueeze(-1) * torch.arange(50, device=q.device)) % 3 != 0
    return seen & (torch.arange(40, device=q.device) != 5).unsqueeze(-1)


_ON_MPS = {"devices": frozenset({"mps"}), "own_calls": own_calls}


def _samples():
    size = lambda n, heads=2: ((1, heads, 40, n), (1, 2, 50, n), (1, 2, 50, n))  # noqa: E731
    return (
        _sample("64", *size(64)),
        *(_sample(f"{n}, causal", *size(n), is_causal=True) for n in (96, 128, 192, 256)),
        _sample("groups", *size(64, 4), enable_gqa=True),
        _sample("other values", (1, 2, 70, 40), (1, 2, 30, 40), (1, 2, 30, 20)),
        _sample("bool mask", *size(64), mask=_checkered),
        _sample("added mask", *size(64), (40, 50)),
        _sample("no keys", (2, 3, 5, 8), (2, 3, 0, 8), (2, 3, 0, 8)),
    )


register(
    Op(
        "scaled_dot_product_attention",
        scaled_dot_product_attention,
        namesake="torch.nn.functional.scaled_dot_product_attention",
        operators=("attention", "attention_backward", "plain_attention"),
        override=(
            Override("scaled_dot_product_attention", _override, at_autograd=True, **_ON_MPS),
            Override("scaled_dot_product_attention", _override, **_ON_MPS),
        ),
        samples=_samples,
        production=lambda batch_size=1, heads=4, sequence_length=128, head_size=128: Sample(
            "",
            ((batch_size, heads, sequence_length, head_size),) * 3,
            {"is_causal": True},
            terms=max(sequence_length, head_size),
            roundings=4,
        ),
    )
)
