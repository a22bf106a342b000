"""scaled_dot_product_attention: PyTorch's, and with windows, softcap, sinks and the logarithms of the sums."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.operators import needs_gradient
from .._core.registry import Op, Override, Sample, register
from .._core.routing import accelerated, is_plain
from ..mac_kernels import attention_kernel
from ._arguments import (
    are_typed,
    are_usual,
    as_autocast,
    as_dimensions,
    bias_of,
    causal_bias,
    check_options,
    check_slopes,
    four_dimensions,
    new_seed,
    takes,
    window_of,
    wrong_dtypes,
)
from ._operators import Options, attend, attention, plain_attention, spread

__all__ = ["scaled_dot_product_attention"]

_NAME = "metalcore.scaled_dot_product_attention"

_by_torch = F.scaled_dot_product_attention


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
    """Computes softmax(query keyᵀ scale + attn_mask) value, as torch.nn.functional.scaled_dot_product_attention.

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

    Example:
        >>> query, key, value = torch.randn(3, 1, 2, 16, 64, device="mps")  # (batch, heads, tokens, size of a head)
        >>> metalcore.scaled_dot_product_attention(query, key, value, is_causal=True).shape
        torch.Size([1, 2, 16, 64])
    """
    path = _path_of(
        *(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa),
        *(window, lower_right, softcap, sinks, alibi_slopes, return_lse),
    )
    if path.name == "torch":
        return _by_torch(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if path.name == "plain":
        return plain_attention(query, key, value, is_causal, _scale(query, scale))
    q, k, v, mask = path.tensors
    check_options(_NAME, q, dropout_p, softcap, sinks)
    options = _options(q, dropout_p, *path.band, scale, softcap)
    if alibi_slopes is not None:
        mask = _with_slopes(q, k, mask, check_slopes(_NAME, alibi_slopes, q.shape[0], q.shape[1], q), options)
    seed = new_seed(q.device) if dropout_p > 0 else None
    if path.name == "kernels":
        out, lse = attention(q, k, v, mask, sinks, None, None, seed, *options)
    else:
        out, lse = attend(q, k, v, mask, sinks, None, None, seed, options)
    out = as_dimensions(out, query, key, value)
    return (out, as_dimensions(lse, query, key, value)) if return_lse else out


class _Path(NamedTuple):
    """The path that a call takes.

    Attributes:
        name: "plain" is the operator for calls without masks and options, as most are. "kernels" is the one with all of
            them. "composite" are PyTorch's ops, for options that PyTorch's function lacks. "torch" is that function,
            which also raises its errors.
        tensors: query, key, value and the mask with four dimensions, for "kernels" and "composite".
        band: left, right and lower_right, as in Options.
    """

    name: str
    tensors: Any = None
    band: tuple[int, int, bool] = (-1, -1, False)


_PLAIN, _TORCH = _Path("plain"), _Path("torch")


def _path_of(
    query, key, value, mask, dropout, causal, scale, enable_gqa, window, lower_right, softcap, sinks, slopes, lse
) -> _Path:
    if not are_typed(query, key, value, mask, dropout, causal, scale, enable_gqa):
        return _TORCH
    plain = mask is None and not dropout and sinks is None and slopes is None and window == (-1, -1)
    plain = plain and not lower_right and type(softcap) is float and softcap == 0
    if plain and are_usual(query, key, value, enable_gqa):
        if not lse:
            return _PLAIN
        return _Path("kernels", (query, key, value, None), (-1, 0 if causal else -1, False))
    left, right = window_of(_NAME, window)
    if mask is not None and type(mask) is not Tensor:
        mask, causal, lower_right = causal_bias(mask, causal, lower_right)
    extended = (left, right) != (-1, -1) or lower_right or bool(softcap) or lse
    extended = extended or sinks is not None or slopes is not None
    q, k, v, mask = as_autocast(query, key, value, mask)
    accepted = accelerated(q, k, v, sinks, slopes) and (mask is None or mask.device == query.device)
    problem, tensors = four_dimensions(q, k, v, mask, enable_gqa, causal) if accepted or extended else (None, None)
    band = left, 0 if causal else right, lower_right
    if accepted and tensors is not None and dropout >= 0 and takes(*tensors[:3], dropout):  # pyright: ignore[reportCallIssue]
        return _Path("kernels", tensors, band)
    if accepted and not extended:  # the ops of PyTorch's function would take wrong dtypes on a simulated device
        problem = wrong_dtypes(q, k, v, mask)
    if problem:
        raise RuntimeError(f"{_NAME}: {problem}")
    return _Path("composite", tensors, band) if extended else _TORCH


def _with_slopes(q, k, mask, slopes, options):
    rows, columns = q.shape[2], k.shape[2]
    bias = bias_of(slopes, columns - rows if options.lower_right else 0, rows, columns)
    if mask is None:
        return bias
    bias = spread(bias, rows, columns, None, None, options)
    return bias.where(mask, -torch.inf) if mask.dtype == torch.bool else bias + mask


def _options(q, dropout_p, left, right, lower_right, scale, softcap):
    return Options(0, 0, left, right, lower_right, _scale(q, scale), float(softcap), float(dropout_p))


def _scale(q, scale):
    return q.shape[-1] ** -0.5 if scale is None else float(scale)


# The override of PyTorch's function. PyTorch takes it apart above the kernels of devices, so it stands where that
# happens.
# On NVIDIA GPUs PyTorch's own kernels are faster.


def _override(previous, count, decline):
    def kernel(
        keyset, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
    ):
        inputs = query, key, value, attn_mask
        if all(map(is_plain, inputs)) and accelerated(query, key, value) and 0 <= dropout_p <= 1:
            _, tensors = four_dimensions(*inputs, enable_gqa, is_causal)
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
                return as_dimensions(out.clone() if differentiated else out, query, key, value)
        return decline(keyset, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    return kernel


def own_calls(release, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
    """Returns whether a release of PyTorch has a kernel of its own for these arguments on a Mac."""
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    keeps_scores = needs_grad or dropout_p > 0 or attn_mask is not None
    lengths, sizes = (query.shape[-2], key.shape[-2]), (query.shape[-1], value.shape[-1])
    return attention_kernel(release, *lengths, *sizes, is_causal, keeps_scores)


def _sample(name, q, k, v, *more, mask=None, **options):
    """Makes a Sample. `mask` makes the mask on the query's device, and `more` are shapes of a mask or of sinks."""
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
