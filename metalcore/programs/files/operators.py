"""The operators that a program file may name. What is not in these lists, no file makes run.

They compute from their arguments alone: none reaches files, processes or other memory, none takes strides and offsets
of memory from its caller, and none gives sizes that depend on values. embedding_bag is not here: PyTorch compares only
the last of its offsets with the number of indices, and reads memory by the others as they are.

Some of PyTorch's operators take arguments as they are and read memory by them. These have a check here: without it a
file could make them read what is not its own, or end the process.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..pointwise import OPERATIONS, REDUCTIONS

__all__ = ["CHECKS", "GETITEM", "allowed_name", "find"]


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> None:
    if not v.numel():
        raise ValueError("v has no elements")
    # For other dimensions PyTorch calls operators that check their arguments.
    if dim in (0, v.dim() - 1) and (g.numel() != v.shape[dim] or g.dtype != v.dtype):
        raise ValueError(f"g has {g.numel()} elements of {g.dtype}, not {v.shape[dim]} of {v.dtype}")


def _recurrent(gates: int, states: int) -> Callable[..., None]:
    """Returns the check of layers with so many gates and states. LSTMs have two states, and may project the first
    one."""

    def check(
        input: Tensor,
        hx: Tensor | Sequence[Tensor],
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> None:
        hidden = [hx] if isinstance(hx, Tensor) else hx
        if [t.dim() for t in (input, *hidden)] != [3] * (1 + states) or num_layers < 1 or not hidden[-1].shape[2]:
            raise ValueError(f"it takes {1 + states} tensors of three dimensions, and at least one layer and one unit")
        result, units = hidden[0].shape[2], hidden[-1].shape[2]
        batch, length = input.shape[0 if batch_first else 1], input.shape[2]
        directions, projected = 2 if bidirectional else 1, result != units
        for state, width in zip(hidden, (result, units)):
            _require("hx", state, [num_layers * directions, batch, width], input)
        each = directions * (2 + 2 * has_biases + projected)
        if len(params) != num_layers * each:
            raise ValueError(f"{num_layers} layers have {num_layers * each} params, not {len(params)}")
        for layer in range(num_layers):
            weights = [[gates * units, result * directions if layer else length], [gates * units, result]]
            shapes = [*weights, *[[gates * units]] * 2 * has_biases, *[[result, units]] * projected] * directions
            for i, shape in enumerate(shapes, layer * each):
                _require(f"params[{i}]", params[i], shape, input)

    return check


def _require(name, tensor, shape, like):
    if list(tensor.shape) != shape or tensor.dtype != like.dtype:
        raise ValueError(f"{name} is {tensor.dtype} of shape {list(tensor.shape)}, not {like.dtype} of {shape}")


# By the operator's name. Each takes the operator's arguments, which are of its schema's types.
CHECKS: dict[str, Callable[..., Any]] = {
    "aten::_weight_norm": _weight_norm,
    "aten::lstm.input": _recurrent(gates=4, states=2),
    "aten::gru.input": _recurrent(gates=3, states=1),
    "aten::rnn_tanh.input": _recurrent(gates=1, states=1),
    "aten::rnn_relu.input": _recurrent(gates=1, states=1),
}


GETITEM = "getitem"

# By the names of their packets, in all of their overloads, or by the one overload that is allowed. Beside them are all
# that generated kernels take. Some have a check of their own (CHECKS).
_ATEN = frozenset(
    """
    linear addmm addmv addbmm baddbmm bmm mm mv dot matmul einsum outer bilinear chain_matmul inner
    lstm.input gru.input rnn_tanh.input rnn_relu.input lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _weight_norm
    fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_hfft2 fft_ihfft2
    fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_hfftn fft_ihfftn fft_fftshift fft_ifftshift fft_fftfreq fft_rfftfreq
    stft hann_window hamming_window blackman_window bartlett_window kaiser_window
    conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d
    avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d max_pool2d_with_indices
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d
    _adaptive_avg_pool2d _adaptive_avg_pool3d
    batch_norm layer_norm group_norm instance_norm rms_norm native_layer_norm native_group_norm
    _native_batch_norm_legit_no_training cosine_similarity norm linalg_vector_norm
    scaled_dot_product_attention softmax _softmax log_softmax _log_softmax
    embedding cross_entropy_loss nll_loss nll_loss_nd mse_loss l1_loss smooth_l1_loss huber_loss
    binary_cross_entropy binary_cross_entropy_with_logits kl_div
    glu prelu rrelu celu selu log_sigmoid hardshrink softshrink silu gelu relu relu6 mish elu leaky_relu
    dropout alpha_dropout feature_dropout native_dropout bernoulli rand rand_like randn randn_like randint randint_like
    view _unsafe_view reshape flatten unflatten view_as reshape_as expand expand_as permute transpose t movedim moveaxis
    swapaxes swapdims adjoint mT mH numpy_T squeeze unsqueeze slice select narrow chunk split split_with_sizes
    tensor_split unsafe_chunk unsafe_split unbind diagonal diag diag_embed alias detach contiguous clone positive
    lift_fresh lift_fresh_copy unfold ravel atleast_1d atleast_2d atleast_3d view_as_real view_as_complex real imag
    cat concat concatenate stack hstack vstack dstack column_stack tile repeat repeat_interleave roll flip fliplr flipud
    rot90 pad constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d
    replication_pad3d _pad_circular pixel_shuffle pixel_unshuffle channel_shuffle im2col col2im
    index index_put index_select index_add index_copy index_fill gather scatter scatter_add scatter_reduce
    select_scatter slice_scatter diagonal_scatter take_along_dim masked_fill masked_scatter where tril triu
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d
    upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa grid_sampler grid_sampler_2d affine_grid_generator
    arange linspace zeros ones full empty scalar_tensor zeros_like ones_like full_like empty_like
    new_zeros new_ones new_full new_empty eye tril_indices triu_indices one_hot meshgrid cartesian_prod
    to _to_copy type_as
    sum mean prod amax amin argmax argmin any all var std var_mean std_mean max min median logsumexp
    cumsum cumprod cummax cummin logcumsumexp sort argsort topk count_nonzero histc
    addcmul addcdiv lerp maximum minimum clip clamp square rsub subtract add sub mul div multiply divide true_divide
    floor_divide fmod remainder pow exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan sinh cosh tanh asin acos
    atan asinh acosh atanh atan2 arctan2 erf erfc erfinv sigmoid abs absolute neg negative sign sgn ceil floor round
    trunc frac reciprocal isnan isinf isfinite eq ne lt le gt ge greater greater_equal less less_equal not_equal
    logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor nan_to_num threshold
    __and__ __or__ __xor__ bucketize searchsorted isin complex polar
    copy fill zero broadcast_to diff _conj conj_physical resolve_conj resolve_neg angle
    broadcast_tensors tensordot kron trace cdist pairwise_distance linalg_norm linalg_cross nansum nanmean logit sinc
    vdot adaptive_max_pool1d adaptive_max_pool3d frobenius_norm nuclear_norm linalg_matrix_norm linalg_inv inverse
    linalg_solve linalg_det det
    """.split()
)
_METALCORE = frozenset(
    """
    relu silu gelu relu2 quick_gelu gated gated_packed bias_activation softmax softmax_scaled log_softmax
    rms_norm add_rms_norm layer_norm add_layer_norm group_norm attention rope rope_ matmul joined_linear add cast
    cross_entropy quant_matmul quant_rows blockwise_matmul dequantize_blockwise conv2d causal_conv1d gated_delta_rule
    affine_matmul affine_matmul_experts affine_rows scaled_matmul scaled_rows scaled_matmul_experts
    """.split()
)
_GENERATED = frozenset(name.split(".")[0] for name in (*OPERATIONS, *REDUCTIONS)) - {"prims"}


def allowed_name(target: Any) -> str | None:
    """Returns the name of an operation in a file, or None if no file may have it."""
    if target is operator.getitem:
        return GETITEM
    if not isinstance(target, torch._ops.OpOverload):
        return None
    schema = target._schema
    name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    return name if find(name) is target else None


@functools.lru_cache(maxsize=4096)
def find(name: str) -> Callable | None:
    """Returns the operator of a name such as "aten::add.Tensor", or None if there is none, or none that is allowed."""
    if name == GETITEM:
        return operator.getitem
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    if namespace == "aten":
        # x.relu_() is as harmless as relu(x), and so are index_put_ and the like.
        base = packet[:-1] if packet.endswith("_") and not packet.endswith("__") else packet
        allowed = base in _ATEN or base in _GENERATED or rest in _ATEN
        overloads = getattr(torch.ops.aten, packet, None) if allowed else None
    elif namespace == "metalcore" and packet in _METALCORE:
        overloads = getattr(torch.ops.metalcore, packet, None)
    else:
        return None
    overload = overload or "default"
    if overloads is None or overload not in overloads.overloads():
        return None
    target = getattr(overloads, overload)
    return target if _is_of_tensors(target._schema) else None


def _is_of_tensors(schema):
    """Returns whether it gives tensors, and needs no memory for them from its caller."""
    kinds = [returned.type.kind() for returned in schema.returns]
    tensors = all(
        kind == "TensorType" or kind == "ListType" and returned.type.getElementType().kind() == "TensorType"
        for kind, returned in zip(kinds, schema.returns)
    )
    return bool(kinds) and tensors and not any(argument.is_out for argument in schema.arguments)
