"""Attention over keys and values that lie in pages, in FlashInfer's terms and layouts.

A cache is a pool of pages: one tensor (pages, 2, page_size, heads, size) in the layout "NHD", or (pages, 2, heads,
page_size, size) in "HND", with keys and values in this order; or a tuple of two tensors without that dimension, whose
values may have another size. A cache whose pages have one token may lack the dimension page_size.

Request i of a batch has the pages kv_indices[kv_indptr[i]:kv_indptr[i + 1]], in this order. All are full except the
last, which has kv_last_page_len[i] tokens. Where requests have several queries, qo_indptr[i]:qo_indptr[i + 1] are those
of request i. These four are vectors of integers.

Kernels bound all of these numbers: none makes them read or write outside of a tensor. A token whose page does not exist
is not seen, and not written. On the CPU and on the simulated device, where it costs nothing, wrong numbers raise a
ValueError.
"""

from __future__ import annotations

from ._append import append_kv
from ._attention import batch_decode, batch_prefill, merge_states
from ._cache import PagedKVCache, PageTable

__all__ = ["PageTable", "PagedKVCache", "append_kv", "batch_decode", "batch_prefill", "merge_states"]
