"""Linear attention with gates: the state of the gated delta rule where a gate has a number for each key, and where the
state adds values as they are."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor

from .._core.registry import Op, Sample, register
from .._core.routing import require_floats, require_tensors
from ._delta_formulas import rule
from ._delta_rule import call, opened

__all__ = [
    "chunk_gla",
    "chunk_kda",
    "chunk_simple_gla",
    "fused_recurrent_gla",
    "fused_recurrent_kda",
    "fused_recurrent_simple_gla",
]


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes Kimi's delta attention over sequences, as the function of this name of flash-linear-attention: the gated
    delta rule with a decay for each key. For each position, the rows of a head's state decay, and it learns v for k:

        S = exp(g)[:, None] * S
        S = S + beta k (v - Sᵀ k)ᵀ
        o = scale Sᵀ q

    Args:
        q, k, v, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens: as
            `chunk_gated_delta_rule` has them.
        g: (batch, length, value heads, keys), the logarithms of the decays, at most 0.

    Returns:
        (o, final state), with gradients of any order, as `chunk_gated_delta_rule`. Positions of a sequence are
        computed one after the other, as `fused_recurrent_kda` does.

    Raises:
        TypeError: an argument is no tensor, or has numbers of another kind.
        RuntimeError: shapes do not go together.

    Source: Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture", 2025.

    Example:
        >>> q, k, v, g = (torch.randn(1, 100, 2, 32, device="mps") for _ in range(4))
        >>> beta = torch.rand(1, 100, 2, device="mps")
        >>> metalcore.chunk_kda(q, k, v, -g.abs(), beta, use_qk_l2norm_in_kernel=True)[0].shape
        torch.Size([1, 100, 2, 32])
    """
    options = output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    return _kda("chunk_kda", q, k, v, g, beta, scale, initial_state, *options, chunked=True)


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes what `chunk_kda` does, position by position, as the function of this name of flash-linear-attention: for
    the few positions of a step that generates.

    Args:
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens: as `chunk_kda`
            has them.

    Returns:
        (o, final state), with gradients, as `chunk_kda`.

    Raises:
        TypeError: an argument is no tensor, or has numbers of another kind.
        RuntimeError: shapes do not go together.

    Example:
        >>> k, v = torch.eye(4, device="mps")[:1].view(1, 1, 1, 4), torch.full((1, 1, 1, 2), 3.0, device="mps")
        >>> beta = torch.ones(1, 1, 1, device="mps")
        >>> metalcore.fused_recurrent_kda(k, k, v, torch.zeros_like(k), beta, scale=1.0)[0].tolist()
        [[[[3.0, 3.0]]]]
    """
    options = output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    return _kda("fused_recurrent_kda", q, k, v, g, beta, scale, initial_state, *options, chunked=False)


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes gated linear attention over sequences, as the function of this name of flash-linear-attention. For each
    position, the rows of a head's state decay, and it adds v for k:

        S = exp(g)[:, None] * S + k vᵀ
        o = scale Sᵀ q

    Args:
        q, k, v, scale, initial_state, output_final_state, cu_seqlens: as `chunk_gated_delta_rule` has them.
        g: (batch, length, value heads, keys), the logarithms of the decays, at most 0.

    Returns:
        (o, final state), with gradients of any order, as `chunk_gated_delta_rule`. Positions of a sequence are
        computed one after the other, as `fused_recurrent_gla` does.

    Raises:
        TypeError: an argument is no tensor, or has numbers of another kind.
        RuntimeError: shapes do not go together.

    Source: Yang, Wang, Shen, Panda, Kim, "Gated Linear Attention Transformers with Hardware-Efficient Training", 2023.

    Example:
        >>> q, k, v, g = (torch.randn(1, 100, 2, 32, device="mps") for _ in range(4))
        >>> metalcore.chunk_gla(q, k, v, -g.abs())[0].shape
        torch.Size([1, 100, 2, 32])
    """
    require_tensors("chunk_gla", g=g)
    options = output_final_state, False, cu_seqlens
    return call("chunk_gla", q, k, v, g, None, scale, initial_state, *options, chunked=True, by_key=True)


def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes what `chunk_gla` does, position by position, as the function of this name of flash-linear-attention: for
    the few positions of a step that generates.

    Args:
        q, k, v, scale, initial_state, output_final_state, cu_seqlens: as `chunk_gla` has them.
        gk: (batch, length, value heads, keys), the logarithms of the decays, or None for no decay.

    Returns:
        (o, final state), with gradients, as `chunk_gla`.

    Raises:
        TypeError: an argument is no tensor, or has numbers of another kind.
        RuntimeError: shapes do not go together.

    Example:
        >>> k, v = torch.eye(4, device="mps")[:1].view(1, 1, 1, 4), torch.full((1, 1, 1, 2), 3.0, device="mps")
        >>> metalcore.fused_recurrent_gla(k, k, v, scale=1.0)[0].tolist()
        [[[[3.0, 3.0]]]]
    """
    options = output_final_state, False, cu_seqlens
    return call("fused_recurrent_gla", q, k, v, gk, None, scale, initial_state, *options, chunked=False, by_key=True)


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes linear attention over sequences with a decay for each head, as the function of this name of
    flash-linear-attention. For each position, a head's state decays, and it adds v for k:

        S = exp(g + g_gamma) S + k vᵀ
        o = scale Sᵀ q

    RetNet's retention is g_gamma = log(1 - 2 ** (-5 - head)). Lightning attention has
    g_gamma = -8 / heads * (1 - layer / layers) * head.

    Args:
        q, k, v, scale, initial_state, output_final_state, cu_seqlens: as `chunk_gated_delta_rule` has them.
        g: (batch, length, value heads), the logarithms of the decays, at most 0, or None.
        g_gamma: (value heads,), the logarithms of decays that all positions have, or None.

    Returns:
        (o, final state), with gradients of any order, as `chunk_gated_delta_rule`. From 64 positions on, chunks of 64
        are products of matrices.

    Raises:
        TypeError: an argument is no tensor, or has numbers of another kind.
        RuntimeError: shapes do not go together.

    Source: Sun et al., "Retentive Network: A Successor to Transformer for Large Language Models", 2023.

    Example:
        >>> q, k, v = (torch.randn(1, 100, 2, 32, device="mps") for _ in range(3))
        >>> gamma = torch.log1p(-(2.0 ** (-5 - torch.arange(2, device="mps"))))
        >>> metalcore.chunk_simple_gla(q, k, v, g_gamma=gamma)[0].shape
        torch.Size([1, 100, 2, 32])
    """
    g = _gates("chunk_simple_gla", v, g, g_gamma)
    options = output_final_state, False, cu_seqlens
    return call("chunk_simple_gla", q, k, v, g, None, scale, initial_state, *options, chunked=True)


def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    *,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes what `chunk_simple_gla` does, position by position, as the function of this name of
    flash-linear-attention: for the few positions of a step that generates.

    Args:
        q, k, v, g, g_gamma, scale, initial_state, output_final_state, cu_seqlens: as `chunk_simple_gla` has them.

    Returns:
        (o, final state), with gradients, as `chunk_simple_gla`.

    Raises:
        TypeError: an argument is no tensor, or has numbers of another kind.
        RuntimeError: shapes do not go together.

    Example:
        >>> k, v = torch.eye(4, device="mps")[:1].view(1, 1, 1, 4), torch.full((1, 1, 1, 2), 3.0, device="mps")
        >>> metalcore.fused_recurrent_simple_gla(k, k, v, scale=1.0)[0].tolist()
        [[[[3.0, 3.0]]]]
    """
    op = "fused_recurrent_simple_gla"
    g = _gates(op, v, g, g_gamma)
    options = output_final_state, False, cu_seqlens
    return call(op, q, k, v, g, None, scale, initial_state, *options, chunked=False)


def _kda(op, q, k, v, g, beta, *rest, chunked):
    require_tensors(op, g=g, beta=beta)
    return call(op, q, k, v, g, beta, *rest, chunked=chunked, by_key=True)


def _gates(op, v, g, g_gamma):
    require_tensors(op, v=v)
    require_tensors(op, optional=True, g=g, g_gamma=g_gamma)
    if g_gamma is None:
        return g
    require_floats(op, v=v, g=g, g_gamma=g_gamma)
    if g_gamma.dim() != 1 or v.dim() != 4 or g_gamma.shape[0] != v.shape[2]:
        raise RuntimeError(
            f"metalcore.{op}: g_gamma must have a number for each of v's heads; their shapes are "
            f"{list(g_gamma.shape)} and {list(v.shape)}"
        )
    everywhere = g_gamma.expand(v.shape[:3])
    return everywhere if g is None else g + everywhere


def _reference_of(function):
    signature = inspect.signature(function)

    def reference(*args, **options):
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        given = bound.arguments
        q, k, v = (given[name] for name in "qkv")
        g = given.get("gk", given.get("g"))
        if given.get("g_gamma") is not None:
            g = given["g_gamma"].expand(v.shape[:3]) + (0 if g is None else g)
        scale = q.shape[-1] ** -0.5 if given["scale"] is None else given["scale"]
        normalized = given.get("use_qk_l2norm_in_kernel", False)
        out, state = rule(q, k, v, g, given.get("beta"), given["initial_state"], given["cu_seqlens"], scale, normalized)
        return out, state if given["output_final_state"] else None

    return reference


def _sample(name, kind, length, keys, values, *, batch=1, heads=2, repeats=1, stateful=True):
    of_keys, of_values = (batch, length, heads, keys), (batch, length, heads * repeats, values)
    by_head = of_values[:3]
    gates = by_head if kind == "simple" else (*by_head, keys)
    shapes = [of_keys, of_keys, of_values, gates, *[by_head] * (kind == "kda")]
    shapes += [(batch, heads * repeats, keys, values)] * stateful

    def arguments(q, k, v, g, *rest):
        state = (None, rest[-1], True) if stateful else ()
        if kind == "kda":
            return q, k, v, -g.abs(), opened(rest[0]), *(state or (None, None, False)), True
        return q, k, v, -g.abs(), *[None] * (kind == "simple" and stateful), *state

    terms = length + keys + values
    return Sample(name, tuple(shapes), arguments=arguments, terms=terms, backward=length > 0)


def _samples_of_kda():
    return (
        _sample("heads of 64", "kda", 70, 40, 64, batch=2, heads=1),
        _sample("heads of 128", "kda", 9, 72, 100, heads=1, repeats=2),
        _sample("heads of 256", "kda", 5, 136, 130, heads=1, stateful=False),
        _sample("empty", "kda", 0, 8, 6),
    )


def _production_of(kind):
    def production(batch_size=1, length=128, heads=4, size=64):
        return _sample("", kind, length, size, size, batch=batch_size, heads=heads, stateful=False)

    return production


for _function, _kind, _samples in (
    (chunk_kda, "kda", _samples_of_kda),
    (fused_recurrent_kda, "kda", _samples_of_kda),
    (chunk_gla, "gla", lambda: (_sample("a gate for each key", "gla", 9, 8, 6, repeats=2),)),
    (fused_recurrent_gla, "gla", lambda: (_sample("a gate for each key", "gla", 9, 8, 6, repeats=2, stateful=False),)),
    (chunk_simple_gla, "simple", lambda: (_sample("a gate for each head", "simple", 70, 8, 20, repeats=2),)),
    (fused_recurrent_simple_gla, "simple", lambda: (_sample("a gate for each head", "simple", 9, 8, 6),)),
):
    register(
        Op(
            _function.__name__,
            _function,
            reference=_reference_of(_function),
            operators=("gated_delta_rule", "gated_delta_rule_backward"),
            integers={"cu_seqlens": torch.int32},
            production=_production_of(_kind),
            samples=_samples,
        )
    )
