"""Requests in pages, and references in float64: attention written as vLLM's and FlashInfer's tests write it, request by
request over gathered keys, with masks made of positions."""

import torch
from references import tensor, wide


class Requests:
    """Some requests whose pages lie in a random order, among pages full of NaN that no request has."""

    def __init__(self, device, lengths, page_size, heads, size, *, value_size=None, dtype=torch.float32, layout="NHD"):
        generator = torch.Generator().manual_seed(len(lengths) + page_size)
        counts = [-(-length // page_size) for length in lengths]
        total = sum(counts) + 3
        order = torch.randperm(total, generator=generator)[: sum(counts)].tolist()
        starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
        self.keys = [tensor(length, heads, size, dtype=dtype) for length in lengths]
        self.values = [tensor(length, heads, value_size or size, dtype=dtype) for length in lengths]
        pools = []
        for rows in (self.keys, self.values):
            pool = torch.full((total, page_size, heads, rows[0].shape[-1]), torch.nan, dtype=dtype)
            for i, row in enumerate(rows):
                for place in range(len(row)):
                    pool[order[starts[i] + place // page_size], place % page_size] = row[place]
            pools.append((pool if layout == "NHD" else pool.transpose(1, 2).contiguous()).to(device))
        self.cache = tuple(pools)
        self.layout = {"kv_layout": layout}
        last = [(length - 1) % page_size + 1 if length else 0 for length in lengths]
        self.pages = tuple(torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in (starts, order, last))


def offsets(counts, device):
    return torch.tensor([sum(counts[:i]) for i in range(len(counts) + 1)], dtype=torch.int32, device=device)


def attention(q, requests, counts, *, causal=False, window=(-1, -1), softcap=0.0, scale=None, masks=None, sinks=None):
    """Results and natural logarithms of the sums, of `counts` queries of each request."""
    results = []
    for i, queries in enumerate(wide(q).split(counts)):
        keys, values = (wide(rows[i]) for rows in (requests.keys, requests.values))
        group = q.shape[1] // keys.shape[1]
        keys, values = (rows.repeat_interleave(group, dim=1) for rows in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries * (q.shape[-1] ** -0.5 if scale is None else scale), keys)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        length = len(keys)
        hidden = torch.zeros(counts[i], length, dtype=torch.bool)
        everything = torch.ones(counts[i], length)
        place = length - counts[i]
        if causal:
            hidden |= torch.triu(everything, diagonal=place + 1).bool()
        if window[0] >= 0:
            hidden |= ~torch.triu(everything, diagonal=place - window[0]).bool()
        if window[1] >= 0:
            hidden |= torch.triu(everything, diagonal=place + 1 + window[1]).bool()
        if masks is not None:
            hidden |= ~masks[i]
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            sink = wide(sinks)[:, None, None].expand(-1, counts[i], 1)
            scores = torch.cat([scores, sink], dim=-1)
        lse = scores.logsumexp(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)
        weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)[..., :length]
        results.append((torch.einsum("hqk,khd->qhd", weights, values), lse.mT))
    return tuple(torch.cat(parts) for parts in zip(*results))
