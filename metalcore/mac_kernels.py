"""What PyTorch itself has on a Mac: since which release an operator ends in a Metal kernel of its own.

An override that nobody has measured on a Mac is off by default where PyTorch has a kernel of its own
(metalcore/overrides/_gains.py), and `tune` may choose PyTorch's op only where there is one that works. What PyTorch
computes by several operators, or by a graph of MPSGraph's, is no kernel of its own.

The table is one of facts. `make mac-check` compares it with each release's wheel for macOS, which must have `evidence`
since that release and not before it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

__all__ = [
    "KERNELS",
    "RELEASES",
    "MacKernel",
    "Release",
    "attention_kernel",
    "fault",
    "has_own",
    "lacking",
    "since",
    "this_release",
]

Release = tuple[int, int]
RELEASES: list[Release] = [(2, minor) for minor in range(10, 16)]  # those that the facts were compared with
OLDEST = RELEASES[0]  # that metalcore supports; what it has is older still


@dataclass(frozen=True)
class MacKernel:
    """What PyTorch has for an operator on `mps`.

    Attributes:
        since: the first release with the kernel.
        evidence: a name in libtorch_cpu.dylib, or several of which there is one; or "aten::…", an operator that has a
            kernel for MPS in the table from which PyTorch is generated.
        faulty: (first release, the first without the fault or None, what is wrong, by a public report).

    Example:
        >>> metalcore.mac_kernels.KERNELS["gelu"].since
        (2, 13)
    """

    since: Release
    evidence: str
    faulty: tuple[tuple[Release, Release | None, str], ...] = ()


_WIDE_QR = (((2, 12), None, "it needs memory for m x m entries, and takes long for tall matrices (pytorch#187567)"),)
_SVD_OF_2_14 = (
    ((2, 14), (2, 15), "it raises for batches of 8192 elements and more, and U may be wrong (pytorch#195937, #196112)"),
)
_FP8_OF_2_15 = (((2, 15), None, "it takes up to 8 times the time of bfloat16's product (pytorch#196916)"),)
# By operators of aten. Those that are not here have no kernel: PyTorch computes them by MPSGraph or by other operators.
KERNELS: dict[str, MacKernel] = {
    "relu": MacKernel((2, 12), "relu_dense_vec4|relu_dense_castout|clamp_scalar_dense_ilp_"),
    "silu": MacKernel((2, 12), "silu_dense_"),
    "silu_backward": MacKernel((2, 12), "silu_backward_dense_"),
    "gelu": MacKernel((2, 13), "gelu_dense_"),
    "gelu_backward": MacKernel((2, 13), "gelu_backward_dense_"),
    "_softmax": MacKernel((2, 15), "softmax_row_float"),
    "_log_softmax": MacKernel((2, 15), "log_softmax_row_float"),
    "native_layer_norm": MacKernel(OLDEST, "layer_norm_single_row_"),
    "native_group_norm": MacKernel((2, 13), "group_norm_bfloat"),
    "native_group_norm_backward": MacKernel((2, 13), "group_norm_backward_x_"),
    "_fused_rms_norm": MacKernel(OLDEST, "rms_norm_looped_"),
    "embedding": MacKernel(OLDEST, "index_select_32bit"),
    "embedding_dense_backward": MacKernel((2, 13), "embedding_dense_backward_float"),
    "_embedding_bag": MacKernel(OLDEST, "embedding_bag_float"),
    "_embedding_bag_forward_only": MacKernel(OLDEST, "embedding_bag_float"),
    "_embedding_bag_backward": MacKernel(OLDEST, "embedding_bag_backward_float"),
    # The steps of optimizers with fused=True; the others are loops over operators.
    "_fused_adamw": MacKernel(OLDEST, "aten::_fused_adamw_"),
    "_fused_sgd": MacKernel(OLDEST, "aten::_fused_sgd_"),
    # Attention of few queries (attention_kernel says of which calls), and of many.
    "scaled_dot_product_attention": MacKernel(OLDEST, "sdpa_vector_2pass_1_float_"),
    "scaled_dot_product_attention, many queries": MacKernel((2, 13), "prefill_attention_float16_bq"),
    "scaled_dot_product_attention, matrix units": MacKernel((2, 14), "prefill_attention_mpp_a10_float16_bq"),
    "_scaled_mm_v2": MacKernel((2, 15), "aten::_scaled_mm_v2.out", _FP8_OF_2_15),
    "linalg_solve_triangular": MacKernel(OLDEST, "MPSMatrixSolveTriangular|triangular_solve_float"),
    "linalg_cholesky_ex": MacKernel(OLDEST, "applyTRSML"),
    "linalg_lu_factor_ex": MacKernel(OLDEST, "aten::linalg_lu_factor_ex.out"),
    "linalg_lu_solve": MacKernel((2, 14), "aten::linalg_lu_solve.out"),
    "_linalg_solve_ex": MacKernel(OLDEST, "aten::_linalg_solve_ex.result"),
    "linalg_inv_ex": MacKernel(OLDEST, "aten::linalg_inv_ex.inverse"),
    "_linalg_det": MacKernel(OLDEST, "aten::_linalg_det.result"),
    "_linalg_slogdet": MacKernel(OLDEST, "aten::_linalg_slogdet.sign"),
    "linalg_householder_product": MacKernel(OLDEST, "orgqr_float"),
    "linalg_qr": MacKernel((2, 12), "aten::linalg_qr.out", _WIDE_QR),
    "geqrf": MacKernel((2, 14), "geqrf_float"),
    "linalg_lstsq": MacKernel((2, 14), "aten::linalg_lstsq.out", _SVD_OF_2_14),
    "_linalg_eigh": MacKernel((2, 14), "eigh_jacobi_float"),
    "_linalg_svd": MacKernel((2, 14), "svd_jacobi_float", _SVD_OF_2_14),
}

# Operators that a plan may call (csrc/gpu/tunable.h) and that have no kernel yet.
_WITHOUT = ("ormqr", "linalg_eig")


def this_release() -> Release:
    """Returns the first two numbers of the installed PyTorch's version.

    Example:
        >>> metalcore.mac_kernels.this_release() >= (2, 10)
        True
    """
    numbers = re.match(r"(\d+)\.(\d+)", torch.__version__)
    assert numbers
    return int(numbers[1]), int(numbers[2])


def since(operator: str) -> Release | None:
    """Returns the first release in which an operator of aten ends in a kernel of its own, or None. One that works in
    place, such as relu_, has the kernel of the other.

    Example:
        >>> metalcore.mac_kernels.since("silu")
        (2, 12)
    """
    kernel = KERNELS.get(operator.removesuffix("_"))
    return kernel.since if kernel else None


def has_own(operator: str, release: Release) -> bool:
    """Returns whether PyTorch has a kernel of its own for an operator of aten.

    Example:
        >>> metalcore.mac_kernels.has_own("silu", (2, 11))  # MPSGraph computed it then
        False
    """
    first = since(operator)
    return first is not None and release >= first


def fault(operator: str, release: Release) -> str | None:
    """Returns what public reports say is wrong with PyTorch's kernel of an operator, or None.

    Example:
        >>> metalcore.mac_kernels.fault("linalg_qr", (2, 12))
        'it needs memory for m x m entries, and takes long for tall matrices (pytorch#187567)'
    """
    for first, fixed, text in KERNELS[operator].faulty if operator in KERNELS else ():
        if release >= first and (fixed is None or release < fixed):
            return text
    return None


def lacking(release: Release) -> list[str]:
    """Returns the operators that no plan may call on `mps`: PyTorch has no kernel for them, or one that is known to
    fail.

    Example:
        >>> metalcore.mac_kernels.lacking((2, 15))
        ['ormqr', 'linalg_eig', '_scaled_mm_v2', 'linalg_qr']
    """
    return [*_WITHOUT, *(name for name in KERNELS if not has_own(name, release) or fault(name, release))]


def attention_kernel(
    release: Release, queries: int, keys: int, size: int, value_size: int, causal: bool, keeps_scores: bool
) -> bool:
    """Returns whether PyTorch has a kernel for a call of attention without a mask, a gradient and dropout.

    All other calls become several operators, or a graph of MPSGraph's that keeps all scores in memory.

    Args:
        queries, keys: their numbers.
        size, value_size: the sizes of a head.
        causal: is_causal.
        keeps_scores: whether a gradient is needed, or there is dropout or a mask.

    Example:
        >>> sizes = dict(queries=1, keys=512, size=64, value_size=64)
        >>> metalcore.mac_kernels.attention_kernel((2, 12), **sizes, causal=False, keeps_scores=False)
        True
    """
    if keeps_scores or size != value_size or keys == 0:
        return False
    if queries <= 8 and queries <= keys:
        sizes = (64, 96, 128) if release < (2, 13) else (64, 96, 128, 256)
        return size in sizes and not (causal and release < (2, 13))
    return queries > 8 and release >= (2, 13) and size in (32, 64, 72, 80, 96, 128, 256)
