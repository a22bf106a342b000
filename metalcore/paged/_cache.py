"""PagedKVCache: pages, and which sequence has which of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.tensors import host_sees
from ._append import append_kv
from ._pages import LAYOUTS, check_tensors, index_vector

__all__ = ["PageTable", "PagedKVCache"]


class PageTable(NamedTuple):
    """The pages of some sequences, as int32 vectors on the cache's device: arguments of the functions in
    `metalcore.paged`.

    Attributes:
        kv_indptr, kv_indices, kv_last_page_len: the sequences' pages.
        qo_indptr: where the new tokens of each sequence begin, if `reserve` made the table.

    Example:
        >>> block_table, lengths = torch.tensor([[3, 0], [1, 2]], device="mps"), torch.tensor([5, 8], device="mps")
        >>> table = metalcore.paged.PageTable.from_block_table(block_table, lengths, page_size=4)
        >>> table.kv_last_page_len.tolist()
        [1, 4]
    """

    kv_indptr: Tensor
    kv_indices: Tensor
    kv_last_page_len: Tensor
    qo_indptr: Tensor | None = None

    @property
    def pages(self) -> tuple[Tensor, Tensor, Tensor]:
        """The first three."""
        return self.kv_indptr, self.kv_indices, self.kv_last_page_len

    @classmethod
    def from_block_table(cls, block_table: Tensor, lengths: Tensor, page_size: int) -> PageTable:
        """Returns a table with a row for each request, as flash-attention and vLLM have it. The host does not wait for
        the device.

        Args:
            block_table: (requests, most), integers: the request's pages. Those behind its last token may be any
                numbers.
            lengths: the requests' tokens, (requests,), integers.
            page_size: tokens of a page.

        Returns:
            A table whose kv_indices has as many numbers as block_table. Those behind the last page are of no request.

        Raises:
            TypeError: an argument is no tensor.
            ValueError: shapes or dtypes are others; or, where the host sees the numbers, a request has more tokens
                than its pages.
        """
        name = "PageTable.from_block_table"
        check_tensors(name, 2, block_table=block_table)
        lengths = index_vector(name, "lengths", lengths, block_table)
        requests, most = block_table.shape
        table = index_vector(name, "block_table", block_table.reshape(-1), block_table)
        if lengths.shape[0] != requests:
            raise ValueError(
                f"metalcore.paged.{name}: block_table has rows for {requests} requests, and lengths has "
                f"{lengths.shape[0]}"
            )
        if host_sees(lengths):
            for request, length in enumerate(lengths.tolist()):
                if not 0 <= length <= most * page_size:
                    raise ValueError(
                        f"metalcore.paged.{name}: request {request} has {length} tokens, and {most} pages of "
                        f"{page_size} in block_table"
                    )
        pages = ((lengths + page_size - 1) // page_size).clamp(0, most)
        indptr = F.pad(pages.cumsum(0), (1, 0)).to(torch.int32)
        last = (lengths - (pages - 1) * page_size).where(pages > 0, 0)
        if table.numel():
            place = torch.arange(table.numel(), dtype=torch.int32, device=table.device)
            request = torch.searchsorted(indptr[1:], place, right=True).clamp(max=requests - 1)
            number = (place - indptr[request]).clamp(max=most - 1)
            table = table[request * most + number]
        return cls(indptr, table, last.to(torch.int32))


class PagedKVCache:
    """A pool of pages for the keys and values of sequences that grow, and may begin alike.

        cache = PagedKVCache(1024, 16, heads=8, head_size=128, device="mps", dtype=torch.float16)
        a = cache.allocate()
        cache.append([a], key, value)                    # (tokens, 8, 128)
        b = cache.fork(a)                                # shares a's pages
        table = cache.append([a, b], key, value)         # a token for each; b gets a copy of the last page first
        y = metalcore.paged.batch_decode(q, cache.layer(), *table.pages)

    The host keeps the tables, and never waits for the device.

    Args:
        pages: that the pool has.
        page_size: tokens of a page, 1 and more.
        heads, head_size: of keys and values.
        layers: of a model; all have the same tables.
        kv_layout: "NHD" or "HND".

    Attributes:
        data: (layers, pages, 2, page_size, heads, head_size), or with heads before page_size in "HND".

    Example:
        >>> cache = metalcore.paged.PagedKVCache(8, 4, heads=2, head_size=64, device="mps")
        >>> key, value = torch.randn(2, 3, 2, 64, device="mps")
        >>> table = cache.append([cache.allocate()], key, value)
        >>> table.kv_last_page_len.tolist()
        [3]
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        heads: int,
        head_size: int,
        *,
        layers: int = 1,
        kv_layout: str = "NHD",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        if kv_layout not in LAYOUTS:
            raise ValueError(f"PagedKVCache: kv_layout must be one of {', '.join(LAYOUTS)}, not {kv_layout!r}")
        if page_size < 1:
            raise ValueError(f"PagedKVCache: page_size must be 1 and more, not {page_size}")
        inner = (page_size, heads) if kv_layout == "NHD" else (heads, page_size)
        self.data = torch.zeros(layers, pages, 2, *inner, head_size, dtype=dtype, device=device)
        self.page_size = page_size
        self.kv_layout = kv_layout
        self._free = list(range(pages - 1, -1, -1))  # the next one is the last
        self._users = [0] * pages  # sequences that have each page
        self._pages: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._next = 0

    @property
    def free_pages(self) -> int:
        """How many pages no sequence has."""
        return len(self._free)

    def length(self, sequence: int) -> int:
        """Returns the number of a sequence's tokens."""
        self._check([sequence])
        return self._lengths[sequence]

    def layer(self, index: int = 0) -> Tensor:
        """Returns the pool of one layer, as the functions in `metalcore.paged` take it."""
        return self.data[index]

    def allocate(self) -> int:
        """Returns a new sequence without tokens, by its number."""
        sequence = self._next
        self._next += 1
        self._pages[sequence], self._lengths[sequence] = [], 0
        return sequence

    def fork(self, sequence: int) -> int:
        """Returns a new sequence with the tokens of another one. They share pages. Before one of them appends to a page
        that both have, it gets a copy of this page."""
        self._check([sequence])
        copy = self.allocate()
        self._pages[copy] = list(self._pages[sequence])
        self._lengths[copy] = self._lengths[sequence]
        for page in self._pages[copy]:
            self._users[page] += 1
        return copy

    def free(self, sequence: int) -> None:
        """Forgets a sequence. Pages that no other sequence has are free."""
        self._check([sequence])
        del self._lengths[sequence]
        for page in reversed(self._pages.pop(sequence)):
            self._drop(page)

    def table(self, sequences: Iterable[int]) -> PageTable:
        """Returns the pages of some sequences."""
        return self._table(list(sequences), None)

    def reserve(self, sequences: Sequence[int], tokens: Sequence[int]) -> PageTable:
        """Makes room for new tokens behind the sequences' last ones, whose keys and values `write` writes.

        Raises:
            ValueError: there is no such sequence, or it is named twice, or a number is negative.
            TypeError: a number is no integer.
            RuntimeError: too few pages are free. Nothing has changed then.
        """
        sequences, tokens = list(sequences), list(tokens)
        self._check(sequences)
        if not all(isinstance(count, int) for count in tokens):
            raise TypeError(f"PagedKVCache: numbers of tokens must be integers, not {tokens}")
        if len(sequences) != len(tokens) or len(set(sequences)) != len(sequences) or min(tokens, default=0) < 0:
            raise ValueError("PagedKVCache: reserve needs different sequences, and a number of tokens for each")
        needed = sum(self._new_pages(sequence, count) for sequence, count in zip(sequences, tokens))
        if needed > self._spare(sequences, tokens):
            raise RuntimeError(f"PagedKVCache: {needed} pages are needed, and {self.free_pages} are free")
        copies = []
        for sequence, count in zip(sequences, tokens):
            pages = self._pages[sequence]
            if self._must_copy(sequence, count):
                copies.append((pages[-1], self._take()))
                self._drop(pages[-1])
                pages[-1] = copies[-1][1]
            self._lengths[sequence] += count
            while len(pages) * self.page_size < self._lengths[sequence]:
                pages.append(self._take())
        if copies:
            sources, targets = torch.tensor(copies, device=self.data.device).unbind(1)
            self.data[:, targets] = self.data[:, sources]
        return self._table(sequences, tokens)

    def write(self, table: PageTable, key: Tensor, value: Tensor, layer: int = 0) -> None:
        """Writes the keys and values, (tokens, heads, head_size), of the tokens that `reserve` made room for."""
        append_kv(key, value, self.layer(layer), *table.pages, qo_indptr=table.qo_indptr, kv_layout=self.kv_layout)

    def append(
        self, sequences: Sequence[int], key: Tensor, value: Tensor, tokens: Sequence[int] | None = None
    ) -> PageTable:
        """Reserves room, and writes the first layer's keys and values. `tokens` are as many of each sequence; by
        default all have the same number.

        Raises:
            ValueError, RuntimeError: as `reserve`, or key and value do not go with the cache. Nothing has changed then.
        """
        sequences = list(sequences)
        if tokens is None:
            if not sequences or key.shape[0] % len(sequences):
                raise ValueError(
                    f"PagedKVCache: {key.shape[0]} tokens are no equal parts for {len(sequences)} sequences"
                )
            tokens = [key.shape[0] // len(sequences)] * len(sequences)
        elif sum(tokens) != key.shape[0]:
            raise ValueError(f"PagedKVCache: there are {key.shape[0]} tokens, and not {sum(tokens)}")
        self._check_tokens(key, value)
        table = self.reserve(sequences, tokens)
        self.write(table, key, value)
        return table

    def _check(self, sequences):
        for sequence in sequences:
            if sequence not in self._lengths:
                raise ValueError(f"PagedKVCache: there is no sequence {sequence!r}")

    def _check_tokens(self, key, value):
        expected = (key.shape[0], self.data.shape[-3 if self.kv_layout == "HND" else -2], self.data.shape[-1])
        for name, tensor in (("key", key), ("value", value)):
            if tensor.shape != expected:
                raise ValueError(f"PagedKVCache: {name} must have the shape {expected}, not {tuple(tensor.shape)}")
            if not tensor.is_floating_point() or tensor.dtype != key.dtype or tensor.device != self.data.device:
                raise ValueError(
                    f"PagedKVCache: key and value must have one floating-point dtype and be on {self.data.device}; "
                    f"{name} has {tensor.dtype} and is on {tensor.device}"
                )

    def _must_copy(self, sequence, count):
        """Returns whether new tokens go to a page that another sequence has, too."""
        partly = self._lengths[sequence] % self.page_size
        return bool(count and partly and self._users[self._pages[sequence][-1]] > 1)

    def _new_pages(self, sequence, count):
        length = self._lengths[sequence] + count
        return -(-length // self.page_size) - len(self._pages[sequence]) + self._must_copy(sequence, count)

    def _spare(self, sequences, tokens):
        """Returns free pages, and those that the last of several copying sequences need not copy."""
        sharing: dict[int, int] = {}
        for sequence, count in zip(sequences, tokens):
            if self._must_copy(sequence, count):
                page = self._pages[sequence][-1]
                sharing[page] = sharing.get(page, 0) + 1
        return self.free_pages + sum(count == self._users[page] for page, count in sharing.items())

    def _take(self):
        page = self._free.pop()
        self._users[page] = 1
        return page

    def _drop(self, page):
        self._users[page] -= 1
        if not self._users[page]:
            self._free.append(page)

    def _table(self, sequences, tokens):
        self._check(sequences)
        counts = [len(self._pages[sequence]) for sequence in sequences]
        indices = [page for sequence in sequences for page in self._pages[sequence]]
        last = [
            (self._lengths[sequence] - 1) % self.page_size + 1 if count else 0
            for sequence, count in zip(sequences, counts)
        ]
        return PageTable(
            self._offsets(counts),
            self._vector(indices),
            self._vector(last),
            None if tokens is None else self._offsets(tokens),
        )

    def _offsets(self, counts):
        offsets = [0]
        for count in counts:
            offsets.append(offsets[-1] + count)
        return self._vector(offsets)

    def _vector(self, numbers):
        return torch.tensor(numbers, dtype=torch.int32).to(self.data.device)
