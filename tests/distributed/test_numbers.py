"""Numbers on shards are those on one device."""

import pytest
from checks.rules import LEFT_OUT

from metalcore._core.registry import OPS


def close(ranks, check, limit=5e-6, placement=None, **options):
    for error, found in ranks.run(2, f"numbers.{check}", **options):
        assert error <= limit
        assert placement is None or found == f"({placement},)"


@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
@pytest.mark.parametrize("place", (0, 1))
def test_cross_entropy(ranks, place, reduction):
    close(ranks, "cross_entropy", place=place, reduction=reduction, limit=1e-4)
    options = dict(label_smoothing=0.1, softcap=5.0, z_loss=0.1)
    close(ranks, "cross_entropy", place=place, reduction=reduction, limit=1e-4, **options)


@pytest.mark.parametrize(
    "places, reduction",
    [((None, 0, 0), "mean"), ((1, 0, 0), "mean"), ((0, None, None), "sum"), ((None, 0, 0), "none")],
    ids=("vocabulary", "sequence", "rows", "none"),
)
def test_fused_linear_cross_entropy(ranks, places, reduction):
    close(ranks, "fused_linear_cross_entropy", places=places, reduction=reduction, limit=1e-3)


def test_operators(ranks):
    close(ranks, "embedding", 0, place=0, placement="Partial(sum)")
    close(ranks, "embedding", 0, place=1, placement="Shard(dim=2)")
    close(ranks, "attention", 0, place=0, placement="Shard(dim=0)")
    close(ranks, "attention", 0, place=1, placement="Shard(dim=1)")
    close(ranks, "attention", 0, place=2, placement="Replicate()")
    close(ranks, "norm", 1e-4, place=1, placement="Shard(dim=1)")


@pytest.mark.parametrize("place", (0, 1, 2))
def test_flex_attention(ranks, place):
    """Ranks have batch items or heads, and gather sequences. The functions know which ones."""
    placement = "Replicate()" if place == 2 else f"Shard(dim={place})"
    close(ranks, "flex_attention", 0, place=place, placement=placement)


@pytest.mark.parametrize("place", (None, 0, 1, 2, 3))
def test_convolution(ranks, place):
    """DTensor's own rules have other gradients for shards of the image and of the weight."""
    for weight in (None, 0, 1):
        close(ranks, "convolution", 1e-4, place=place, weight=weight)


@pytest.mark.parametrize("place", (None, 0, 1))
def test_numbers_beside_shards(ranks, place):
    """Tensors that an op makes of a number go with DTensors."""
    close(ranks, "renormalized", 0, place=place)
    close(ranks, "jsd", 1e-5, place=place)
    close(ranks, "bags", 1e-5, place=place)


def test_linear_algebra_has_the_same_bits_and_does_not_communicate(ranks):
    assert ranks.run(2, "numbers.linear_algebra") == [[], []]


@pytest.mark.parametrize("name", ["decompositions", "solutions", "spectra"])
def test_derivatives_of_linear_algebra_are_those_of_one_device(ranks, name):
    """First and second ones, of batches in shards."""
    assert ranks.run(2, "gradients.linear_algebra", kind=name) == [[], []]


# Only DTensors reach info_any: see test_every_rank_raises. No sample has matrices as large as those of
# matrix_exp_scaled.
ELSEWHERE = {"info_any", "matrix_exp_scaled"}


def test_every_way_that_a_rule_allows_has_the_same_values(ranks):
    """Each input of each operator on shards of each dimension that its rule names."""
    wanted = {operator for op in OPS.values() for operator in op.operators} - LEFT_OUT - ELSEWHERE
    for reached, ways, wrong in ranks.run(2, "rules.values", ops=list(OPS)):
        assert wrong == [] and ways > len(OPS)
        assert wanted <= set(reached)


def test_every_rank_raises(ranks):
    for singular, unheld in ranks.run(2, "numbers.refused"):
        assert "Batch element 3" in singular and "singular" in singular
        assert "infinite numbers, which blocks of Q4_K cannot hold" in unheld


@pytest.mark.parametrize(
    "name, place, options",
    [
        ("AdamW", 0, {}),
        ("SGD", 1, {"momentum": 0.9}),
        ("Lion", 0, {}),
        ("Muon", 0, {}),
        ("Muon", 1, {}),
        ("SOAP", 0, {"precondition_frequency": 1, "max_precond_dim": 8}),
    ],
    ids=str,
)
def test_optimizers(ranks, name, place, options):
    for error in ranks.run(2, "numbers.optimizer", name=name, place=place, **options):
        assert error <= 1e-6


def test_collectives(ranks):
    found = ranks.run(2, "numbers.messages")
    for rank, (received, gathered, halves, exchanged) in enumerate(found):
        assert received == [2.0 - rank] * 3
        assert gathered == [[1.0] * 3, [2.0] * 3]
        assert halves == [2.0 * (rank + 1)] * 3
        assert exchanged == [0.0 + rank, 10.0 + rank]
