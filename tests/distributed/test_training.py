"""Several ranks train as one does."""

import pytest

STEPS = 2


@pytest.mark.parametrize(
    "kind, count, options",
    [
        ("ddp", 2, {}),
        ("fsdp", 2, {"accumulate": 2, "checkpointing": True}),
        ("fsdp", 2, {"optimizer": "soap"}),
        ("offload", 2, {}),
        ("tp", 2, {"optimizer": "lion"}),
        ("sequence", 2, {}),
        ("tp x fsdp", 4, {}),
    ],
    ids=str,
)
def test_losses_are_those_of_one_rank(ranks, kind, count, options):
    for found, alone in ranks.run(count, "training.train", kind=kind, steps=STEPS, **options):
        assert found == pytest.approx(alone, rel=0, abs=1e-5)


@pytest.mark.parametrize("by", ["accelerate", "trainer"])
def test_launched_by_torchrun(ranks, by):
    """With accelerate's settings for ranks that exchange by way of the CPU, and compute on mps."""
    for loss, weight in ranks.run(2, f"launchers.by_{by}", steps=STEPS):
        assert loss <= 2e-4 if by == "trainer" else 1e-5  # it rounds what it logs
        assert weight <= 1e-6


def test_accelerate_says_where_ranks_would_train_alone(ranks):
    assert ranks.run(2, "launchers.warned") == [[(1, "mps", 1), (2, "mps", 0)]] * 2


def test_mixed_precision(ranks):
    for found, alone in ranks.run(2, "training.train", kind="mixed", steps=STEPS):
        assert found == pytest.approx(alone, rel=1e-2)


def test_a_checkpoint_is_loaded_by_other_numbers_of_ranks(ranks, tmp_path):
    folder, found = str(tmp_path / "checkpoint"), []
    for first, (count, save) in enumerate(((4, (True, True)), (2, (False, True)), (1, (False, False)))):
        found += ranks.run(count, "training.checkpoint", folder=folder, first=first, steps=1, save=save)[0]
    assert found == pytest.approx(ranks.run(1, "training.alone", steps=3)[0], rel=0, abs=1e-5)
