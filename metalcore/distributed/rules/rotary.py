"""rope runs on shards of the batch, of heads and of tokens. It is linear in queries and keys."""

from __future__ import annotations

from ._rule import Partial, Replicate, Shard, rule


def _tables(call, dim):
    """Returns the angles, or the positions of tokens in a table of angles: (sections, batch or 1, tokens, …)."""
    placed = {}
    name = "cos" if call.positions is None else "positions"
    spec = getattr(call, name)
    place = {0: 1, 3 - call.heads_dim: 2}.get(dim)
    if place is not None and spec.shape[place] > 1:
        for each in ("cos", "sin") if name == "cos" else (name,):
            placed[each] = Shard(place)
    return placed


def _placed(call):
    for dim in range(3):
        both = {"q": Shard(dim)} | ({"k": Shard(dim)} if call.k is not None else {})
        yield Shard(dim), both | _tables(call, dim)
    yield Partial(), {"q": Partial()} | ({"k": Partial()} if call.k is not None else {})


@rule("rope")
def rope(call):
    for placement, inputs in _placed(call):
        # Without k there is an empty tensor in its place.
        yield (placement, placement if call.k is not None else Replicate()), inputs


@rule("rope_")
def rope_(call):
    for _, inputs in _placed(call):
        yield (), inputs
