"""Functions of scores and of places, as PyTorch's attention gym has them, and the formula that attention with them is
held against. `make(device, dtype)` gives a case's score_mod, mask_mod and the tensors with gradients."""

import math

import torch

HEADS, QUERIES, KEYS = 4, 130, 150


def numbers(shape, seed):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def causal(device, dtype):
    return None, lambda b, h, q, k: q >= k, ()


def sliding_window(device, dtype, size=40):
    return None, lambda b, h, q, k: (q >= k) & (q - k <= size), ()


def prefix_lm(device, dtype):
    lengths = torch.tensor([70, 10], device=device)
    return None, lambda b, h, q, k: (k < lengths[b]) | (q >= k), ()


def documents(device, dtype):
    ids = (torch.arange(max(QUERIES, KEYS), device=device) // 37).to(torch.int32)
    return None, lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k), ()


def natten(device, dtype, width=13, reach=3):
    def mask(b, h, q, k):
        x, y, column, row = q % width, q // width, k % width, k // width
        return ((x - column).abs() <= reach) & ((y - row).abs() <= reach)

    return None, mask, ()


def no_keys(device, dtype):
    """Some queries see no key, and a whole block of them sees none. The keys of a query, and the queries of a key, have
    ends of each kind."""

    def mask(b, h, q, k):
        return (q % 3 != 0) & (q > 70) & (k < 90) & (q - 100 <= k) & (20 + h <= k) & ~(k - 5 == q) & (q - 2 * k < 12)

    return None, mask, ()


def alibi(device, dtype):
    slopes = numbers((HEADS,), 1).to(device, dtype).requires_grad_()
    return (lambda score, b, h, q, k: score - slopes[h] * (q - k).abs() / 16), None, (slopes,)


def relative_positions(device, dtype):
    table = (4 * numbers((QUERIES + KEYS, HEADS), 2)).to(device, dtype).t().requires_grad_()
    return (lambda score, b, h, q, k: score + table[h, q - k + KEYS - 1]), causal(device, dtype)[1], (table,)


def softcap(device, dtype, cap=3.0):
    return (lambda score, b, h, q, k: cap * torch.tanh(score / cap)), causal(device, dtype)[1], ()


def learned_cap(device, dtype):
    """A number in a tensor without dimensions, a branch by torch.where, and numbers of each query from the end."""
    cap = torch.tensor(2.5, device=device, dtype=dtype).requires_grad_()
    gates = numbers((2, QUERIES), 3).to(device, dtype)

    def score(s, b, h, q, k):
        s = torch.where(q < k, s * gates[b, q - QUERIES], s)
        return cap * torch.tanh(s / cap)

    return score, None, (cap,)


def formula(query, key, value, score_mod, mask_mod):
    """Attention in the tensors' dtype, by all scores: the results and the logarithms of the sums."""
    (batch, heads, rows, size), columns = query.shape, key.shape[2]
    key, value = (x.repeat_interleave(heads // key.shape[1], 1) for x in (key, value))
    at = torch.meshgrid(*(torch.arange(n) for n in (batch, heads, rows, columns)), indexing="ij")
    scores = (query @ key.mT) / math.sqrt(size)
    scores = scores if score_mod is None else score_mod(scores, *at)
    seen = torch.ones((), dtype=torch.bool) if mask_mod is None else mask_mod(*at)
    scores = scores.masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -math.inf, 0).unsqueeze(-1)).exp()
    return weights @ value, lse


def learned_tables(device, dtype):
    """Tensors that are read at numbers of every kind: of pairs, of both by themselves, of what is left of a division,
    at places that repeat or lie behind the end, and by way of another function."""
    seeds = iter(range(10, 20))

    def table(*shape):
        return numbers(shape, next(seeds)).to(device, dtype).requires_grad_()

    pairs, steps, scales, ends = table(QUERIES, KEYS), table(HEADS, 7), table(5, 3), table(KEYS)
    nested, groups = table(2, HEADS, QUERIES), table(4, 5)
    ids = (torch.arange(KEYS, device=device) // 40).to(torch.int32)

    def score(s, b, h, q, k):
        s = s * scales.exp()[q % 5, h % 3] + steps[h, (q - k).clamp(0, 6)]
        s = s + ends[k] * ends[-q - 1] + pairs[q, k]
        return s + nested[b, h, q] + groups[ids[q], ids[k] % 5]

    return score, causal(device, dtype)[1], (pairs, steps, scales, ends, nested, groups)


def learned_vectors(device, dtype):
    """Vectors at places of every kind: embeddings of distances, vectors of heads and of pairs, several at once, tensors
    that are no tables, parts of them, products and look-ups. Two tables have a number for each distance."""
    seeds = iter(range(30, 40))

    def table(*shape):
        return (numbers(shape, next(seeds)) - 0.5).to(device, dtype).requires_grad_()

    distances, heads, corners = table(QUERIES + KEYS, 35), table(HEADS, 35), table(4, 5, 2, 3)
    words, mix, factors, gaps = table(KEYS, 3), table(3), table(3, QUERIES), table(2, QUERIES + KEYS)
    ids = (torch.arange(KEYS, device=device) // 40).to(torch.int32)
    neighbors = (torch.arange(KEYS, device=device)[:, None] * torch.tensor([3, 7], device=device)) % KEYS

    def score(s, b, h, q, k):
        s = s + (distances[q - k + KEYS] * heads[h]).sum(-1) + corners[ids[q], k % 5].square().sum((-1, -2))
        s = s + (words[neighbors[k]].prod(-2) * mix).sum(-1)
        s = s + torch.einsum("...i,...i->...", words[q].softmax(-1), words[-k - 1] * mix[1])
        scaled = (factors * heads[h, 0])[1][q] if not s.dim() else factors[1, q] * heads[h, 0]
        return s * (1 + gaps[0, q - k + KEYS]) + gaps[1, (k - q).abs()] + scaled

    return score, causal(device, dtype)[1], (distances, heads, corners, words, mix, factors, gaps)


def other_reads(device, dtype):
    """Reads of captured tensors and products of vectors that are operations of their own in PyTorch."""
    words, mix, columns, line = (
        (numbers(shape, 40 + i) - 0.5).to(device, dtype).requires_grad_()
        for i, shape in enumerate(((KEYS, 3), (3, 2), (4, KEYS), (KEYS,)))
    )

    def score(s, b, h, q, k):
        at = k.long().reshape(-1)
        of_column = columns[1:3, k].sum(0) if not s.dim() else columns[1:3].sum(0)[k]
        s = s * (1 + torch.gather(line, 0, at).reshape(k.shape)) + of_column + line.take(2 * q.long() % 7)
        s = s - torch.linalg.vector_norm(words[q] - words[k] + 0.1, dim=-1) + (words[k] @ mix).sum(-1)
        chosen = torch.index_select(words, 0, at).reshape(*k.shape, 3)
        return s + (chosen * torch.nn.functional.embedding(q, words)).sum(-1)

    return score, causal(device, dtype)[1], (words, mix, columns, line)


def distances(device, dtype):
    """Reductions of vectors that both places have, in loops."""
    places = numbers((max(QUERIES, KEYS), 3), 4).to(device, dtype)

    def score(s, b, h, q, k):
        apart = (places[q] - places[k]).abs()
        s = s * torch.exp(-apart.pow(2).sum(-1).sqrt()) + apart.mean(-1) - apart.amax(-1, keepdim=True).prod(-1)
        return torch.where((apart > 0.9).any(-1), -s, s) + apart.var(-1)

    return score, None, ()


def latent(device, dtype, size=64):
    """Heads of multi-head latent attention: the part with rotary positions is a product of captured vectors."""
    queries, keys = numbers((2, HEADS, QUERIES, size), 5).to(device, dtype), numbers((2, 1, KEYS, size), 6)
    keys = keys.to(device, dtype)
    return (lambda s, b, h, q, k: s + (queries[b, h, q] * keys[b, h // HEADS, k]).sum(-1) / 16), None, ()
