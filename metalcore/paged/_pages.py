"""Caches' layouts, checks of the numbers that say where a request's tokens are, and the factors of quantized caches."""

from __future__ import annotations

import torch
from torch import Tensor

from .._core.tensors import check_offsets, host_sees

__all__ = [
    "Cache",
    "check_append",
    "check_mask",
    "check_pages",
    "check_tensors",
    "index_vector",
    "scaled",
    "split_cache",
]

Cache = Tensor | tuple[Tensor, Tensor]
LAYOUTS = ("NHD", "HND")


def check_tensors(function: str, dims: int, **tensors: object) -> None:
    """Raises TypeError for what is no tensor, and ValueError for a tensor with another number of dimensions."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"metalcore.paged.{function}: {name} must be a tensor, not {type(tensor).__name__}")
        if tensor.dim() != dims:
            raise ValueError(f"metalcore.paged.{function}: {name} must have {dims} dimensions, not {tensor.dim()}")


def split_cache(function: str, cache: Cache, kv_layout: str) -> tuple[Tensor, Tensor]:
    """Returns the pools of keys and of values, with 4 dimensions each. Pages of one token may lack their dimension."""
    if kv_layout not in LAYOUTS:
        raise ValueError(
            f"metalcore.paged.{function}: kv_layout must be one of {', '.join(LAYOUTS)}, not {kv_layout!r}"
        )
    if isinstance(cache, Tensor):
        if cache.dim() not in (4, 5) or cache.shape[1] != 2:
            raise ValueError(
                f"metalcore.paged.{function}: a cache that is one tensor has the shape (pages, 2, …) and 5 dimensions, "
                f"or 4 for pages of one token, not {tuple(cache.shape)}"
            )
        k, v = cache[:, 0], cache[:, 1]
    else:
        if not isinstance(cache, (tuple, list)) or len(cache) != 2:
            raise TypeError(f"metalcore.paged.{function}: a cache is a tensor or two, not {type(cache).__name__}")
        k, v = cache
        check_tensors(function, 3 if isinstance(k, Tensor) and k.dim() == 3 else 4, keys=k, values=v)
    if k.dim() == 3:
        k, v = (pool.unsqueeze(1 if kv_layout == "NHD" else 2) for pool in (k, v))
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"metalcore.paged.{function}: keys and values of the shapes {tuple(k.shape)} and {tuple(v.shape)} are no "
            "cache"
        )
    size = k.shape[1 if kv_layout == "NHD" else 2]
    if size < 1:
        raise ValueError(f"metalcore.paged.{function}: pages must have a token and more, not {size}")
    return k, v


def index_vector(function: str, name: str, numbers: Tensor, on: Tensor) -> Tensor:
    """Returns the numbers as kernels take them: int32, contiguous, on the device of `on`."""
    check_tensors(function, 1, **{name: numbers})
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype is torch.bool:
        raise ValueError(f"metalcore.paged.{function}: {name} must have integers, not {numbers.dtype}")
    vector = numbers.to(device=on.device, dtype=torch.int32).contiguous()
    if numbers.element_size() > 4 and host_sees(numbers) and not torch.equal(vector.to(numbers), numbers):
        raise ValueError(f"metalcore.paged.{function}: {name} has numbers that do not fit in int32")
    return vector


def check_pages(
    function: str,
    pages: int,
    page_size: int,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor | None = None,
    qo_indptr: Tensor | None = None,
    queries: int = 0,
) -> None:
    """Raises ValueError for vectors of different numbers of requests. If the host sees the numbers, it also raises it
    for a page that is not in the pool, offsets that descend or lead out of a tensor, and last pages of an impossible
    length."""
    requests = kv_indptr.shape[0] - 1
    for name, numbers, count in (
        ("kv_last_page_len", kv_last_page_len, requests),
        ("qo_indptr", qo_indptr, requests + 1),
    ):
        if numbers is not None and requests >= 0 and numbers.shape[0] != count:
            raise ValueError(
                f"metalcore.paged.{function}: {requests} requests need {count} numbers in {name}, not "
                f"{numbers.shape[0]}"
            )
    if not host_sees(kv_indices):
        return
    indptr = check_offsets(f"metalcore.paged.{function}", "kv_indptr", kv_indptr, kv_indices.shape[0])
    used = kv_indices[indptr[0] : indptr[-1]]
    for page in used.tolist():
        if not 0 <= page < pages:
            raise ValueError(f"metalcore.paged.{function}: kv_indices has the page {page}, and the cache has {pages}")
    if kv_last_page_len is not None:
        for request, length in enumerate(kv_last_page_len.tolist()):
            if indptr[request] < indptr[request + 1] and not 1 <= length <= page_size:
                raise ValueError(
                    f"metalcore.paged.{function}: kv_last_page_len[{request}] is {length}, and pages have {page_size} "
                    "tokens"
                )
    if qo_indptr is not None:
        check_offsets(f"metalcore.paged.{function}", "qo_indptr", qo_indptr, queries)


def check_mask(function: str, mask: Tensor, mask_indptr: Tensor) -> None:
    """Raises ValueError for a mask that has not an element for each query and key, if the host sees how many there
    are."""
    if not host_sees(mask_indptr):
        return
    elements = int(mask_indptr[-1])
    if mask.shape[0] != elements:
        raise ValueError(
            f"metalcore.paged.{function}: custom_mask has {mask.shape[0]} elements, and the requests' queries times "
            f"their keys are {elements}"
        )


def check_append(function: str, page_size: int, batch_indices: Tensor, positions: Tensor, kv_indptr: Tensor) -> None:
    """Raises ValueError for a token of no request, or behind its request's last page, if the host sees these
    numbers. A request of -1 leaves a token out."""
    if not host_sees(batch_indices):
        return
    indptr = kv_indptr.tolist()
    for token, (request, position) in enumerate(zip(batch_indices.tolist(), positions.tolist())):
        if request == -1:
            continue
        if not 0 <= request < len(indptr) - 1:
            raise ValueError(f"metalcore.paged.{function}: token {token} is of request {request}, of {len(indptr) - 1}")
        most = (indptr[request + 1] - indptr[request]) * page_size
        if not 0 <= position < most:
            raise ValueError(
                f"metalcore.paged.{function}: token {token} has the position {position}, and the pages of request "
                f"{request} have {most}"
            )


def scaled(function: str, q: Tensor, kv_heads: int, scale: float, q_scale, k_scale, v_scale):
    """Returns the queries, the factor of scores, and what the results are multiplied by, or None. The host does not
    read tensors: those of queries and keys go into the queries, which are float32 then, so that nothing is rounded."""
    heads = q.shape[1]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    for name, factor, count in (("q_scale", q_scale, heads), ("k_scale", k_scale, kv_heads)):
        if isinstance(factor, Tensor):
            q = q.to(wide) * _of_heads(function, name, factor, count, q)
        elif factor is not None:
            scale *= _number(function, name, factor)
    if v_scale is None or isinstance(v_scale, Tensor):
        return q, scale, None if v_scale is None else _of_heads(function, "v_scale", v_scale, kv_heads, q)
    return q, scale, _number(function, "v_scale", v_scale)


def _number(function, name, factor):
    if type(factor) not in (int, float):
        raise TypeError(f"metalcore.paged.{function}: {name} must be a number or a tensor, not {type(factor).__name__}")
    return float(factor)


def _of_heads(function, name, factor, count, q):
    """Returns the factors of the heads of queries, with a dimension for their elements."""
    if not factor.is_floating_point() or factor.numel() not in (1, count) or factor.dim() > 1:
        raise ValueError(
            f"metalcore.paged.{function}: {name} must be a floating-point number or {count} of them, not "
            f"{tuple(factor.shape)} of {factor.dtype}"
        )
    if factor.device != q.device:
        raise RuntimeError(f"metalcore.paged.{function}: {name} must be on q's device, {q.device}, not {factor.device}")
    factor = factor.reshape(-1).to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    return (factor if factor.numel() == 1 else factor.repeat_interleave(q.shape[1] // count)).unsqueeze(-1)
