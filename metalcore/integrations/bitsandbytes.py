"""bitsandbytes on metalcore's kernels: BitsAndBytesConfig, peft's QLoRA, bnb.nn and bnb.optim on `mps`.

Where metalcore and bitsandbytes are both imported, whichever comes first, bitsandbytes' operators `bitsandbytes::…` run
metalcore's kernels on `mps`, in the place of those that it makes of PyTorch's ops. `register("cuda")` does the same on
NVIDIA GPUs, where bitsandbytes has kernels by itself.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from .._core.operators import ops
from ..quant._blockwise import BLOCK_SIZES, pack_blocks, unpack_blocks
from ..quant._four_bits import as_bytes
from ..quant._int8 import int8_product

__all__ = ["register"]

# By name, as after "bitsandbytes::".
_KERNELS: dict[str, Callable[..., Any]] = {}
_KEYS = {"mps": "MPS", "cuda": "CUDA"}
_registered: set[str] = set()


def register(device: str = "mps") -> None:
    """Runs bitsandbytes' operators on a kind of device with metalcore's kernels, from now on. It does nothing where it
    was called before.

    Args:
        device: "mps" or "cuda".

    Raises:
        ValueError: device is another.
        ModuleNotFoundError: bitsandbytes is not installed.

    Example:
        >>> from metalcore.integrations.bitsandbytes import register
        >>> register("cpu")
        Traceback (most recent call last):
        ValueError: bitsandbytes.register: device must be "mps" or "cuda", not 'cpu'
    """
    if device not in _KEYS:
        raise ValueError(f'bitsandbytes.register: device must be "mps" or "cuda", not {device!r}')
    if device in _registered:
        return
    importlib.import_module("bitsandbytes._ops")  # which defines the operators
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*[Oo]verriding a previously registered kernel")
        for name, kernel in _KERNELS.items():
            if hasattr(getattr(torch.ops.bitsandbytes, name.split(".")[0], None), name.partition(".")[2] or "default"):
                _library().impl(name, kernel, _KEYS[device], allow_override=True)
    if device == "mps":
        _keep_states_plain()
    _registered.add(device)


def _keep_states_plain():
    """Lets bitsandbytes' paged optimizers make plain states on `mps`: it asks CUDA for pages."""
    optimizer = importlib.import_module("bitsandbytes.optim.optimizer").Optimizer8bit
    theirs = optimizer.get_state_buffer

    @functools.wraps(theirs)
    def get_state_buffer(self, p, dtype=torch.float32):
        if p.device.type != "mps":
            return theirs(self, p, dtype=dtype)
        if self.is_paged and not getattr(self, "_metalcore_warned", False):
            name = type(self).__name__
            warnings.warn(f"{name}: the states of a paged optimizer are plain tensors on mps", stacklevel=2)
            self._metalcore_warned = True
        return torch.zeros_like(p, dtype=dtype)

    optimizer.get_state_buffer = get_state_buffer


@functools.cache
def _library():
    return torch.library.Library("bitsandbytes", "FRAGMENT")


def _kernel(name):
    def add(function):
        _KERNELS[name] = function
        return function

    return add


def _kernel_with_out(name):
    """Registers the function, and one that copies its result to `out`."""

    def add(function):
        def to_out(*inputs, out=None):  # some operators take it by its place
            *inputs, out = inputs if out is None else (*inputs, out)
            out.copy_(function(*inputs))

        _KERNELS[name], _KERNELS[f"{name}.out"] = function, to_out
        return function

    return add


@_kernel("quantize_4bit")
def _quantize_4bit(A, blocksize, quant_type, quant_storage):
    packed, absmax = ops.quantize_blockwise(A, quant_type, blocksize, None)
    return packed.view(quant_storage)[:, None], absmax


@_kernel_with_out("dequantize_4bit")
def _dequantize_4bit(A, absmax, blocksize, quant_type, shape, dtype):
    return ops.dequantize_blockwise(
        as_bytes(A), absmax.float(), None, None, None, quant_type, blocksize, None, list(shape), dtype
    )


@_kernel_with_out("gemv_4bit")
def _gemv_4bit(A, B, shapeB, absmax, code, blocksize):
    return _gemm_4bit(A, B, shapeB, absmax, blocksize, "fp4" if code[1] > 0 else "nf4")


@_kernel("gemm_4bit")
def _gemm_4bit(
    A,
    B,
    shapeB,
    absmax,
    blocksize,
    quant_type,
    bias=None,
    absmax_8bit=None,
    absmax_code=None,
    absmax_offset=None,
):
    absmax, absmax_code, absmax_offset = (
        each if each is None else each.float() for each in (absmax, absmax_code, absmax_offset)
    )
    result = ops.blockwise_matmul(
        A, as_bytes(B), absmax, absmax_8bit, absmax_code, absmax_offset, quant_type, blocksize, *shapeB, False
    )
    return result if bias is None else result + bias


@_kernel("quantize_blockwise")
def _quantize_blockwise(A, code, blocksize):
    pack = ops.quantize_blockwise if blocksize in BLOCK_SIZES else pack_blocks  # which takes any size
    packed, absmax = pack(A, "code", blocksize, code.float())
    return packed.view(A.shape), absmax


@_kernel_with_out("dequantize_blockwise")
def _dequantize_blockwise(A, absmax, code, blocksize, dtype):
    if blocksize not in BLOCK_SIZES:
        return unpack_blocks(A, absmax.float(), "code", blocksize, code.float(), A.shape).to(dtype)
    return ops.dequantize_blockwise(
        A, absmax.float(), None, None, None, "code", blocksize, code.float(), list(A.shape), dtype
    )


@_kernel_with_out("int8_linear_matmul")
def _int8_linear_matmul(A, B):
    return int8_product(A, B)


@_kernel("int8_double_quant")
def _int8_double_quant(A, threshold=0.0):
    by_rows, row_stats, outlier_columns = torch.ops.bitsandbytes.int8_vectorwise_quant(A, threshold)
    columns = A.reshape(-1, A.shape[-1])
    if threshold > 0:
        columns = columns.masked_fill(columns.abs() >= threshold, 0)
    column_stats = columns.abs().amax(0).float()
    by_columns = torch.round(columns * (127 / column_stats)).nan_to_num(0).to(torch.int8)
    return by_rows, by_columns.view(A.shape), row_stats, column_stats, outlier_columns


# Its optimizers update one parameter a call. Those that have no kernel here are updated by its functions for the CPU,
# which are made of PyTorch's ops.
_ALGORITHMS = ("adam", "lion", "momentum")


def _of_cpu(name):
    return getattr(importlib.import_module("bitsandbytes.backends.cpu.ops"), f"_{name}_cpu")


def _arguments(name, inputs, options):
    """Returns the arguments of a call of one of bitsandbytes' operators by their names."""
    schema = getattr(torch.ops.bitsandbytes, name).default._schema
    given = {argument.name: value for argument, value in zip(schema.arguments, inputs)} | options
    return SimpleNamespace(**{argument.name: argument.default_value for argument in schema.arguments} | given)


@_kernel("optimizer_update_8bit_blockwise")
def _update_8bit(*inputs, **options):
    of = _arguments("optimizer_update_8bit_blockwise", inputs, options)
    if of.optimizer_name not in _ALGORITHMS:
        return _of_cpu("optimizer_update_8bit_blockwise")(*inputs, **options)
    adam = of.optimizer_name == "adam"
    ops.update_8bit_(
        [of.p.data],
        [of.g],
        [of.state1],
        [of.state2] if adam else [],
        [of.absmax1],
        [of.absmax2] if adam else [],
        of.qmap1,
        of.qmap2 if adam else None,
        of.optimizer_name,
        lr=of.lr,
        beta1=of.beta1,
        beta2=of.beta2,
        eps=of.eps,
        weight_decay=of.weight_decay,
        grad_scale=of.gnorm_scale,
        step=of.step,
    )


@_kernel("optimizer_update_32bit")
def _update_32bit(*inputs, **given):
    of = _arguments("optimizer_update_32bit", inputs, given)
    plain = of.max_unorm <= 0 and of.gnorm_scale == 1
    options = {"lr": of.lr, "beta1": of.beta1, "beta2": of.beta2, "weight_decay": of.weight_decay, "maximize": False}
    if of.optimizer_name == "adam" and plain:
        steps = [torch.tensor(float(of.step - 1), device="cpu")]
        ops.adamw_([of.p.data], [of.g], [of.state1], [of.state2], [], steps, eps=of.eps, **options)
    elif of.optimizer_name == "lion" and plain:
        ops.lion_([of.p.data], [of.g], [of.state1], **options)
    else:
        _of_cpu("optimizer_update_32bit")(*inputs, **given)
