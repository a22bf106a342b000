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


def test_mixed_precision(ranks):
    for found, alone in ranks.run(2, "training.train", kind="mixed", steps=STEPS):
        assert found == pytest.approx(alone, rel=1e-2)


def test_a_checkpoint_is_loaded_by_other_numbers_of_ranks(ranks, tmp_path):
    folder, found = str(tmp_path / "checkpoint"), []
    for first, (count, save) in enumerate(((4, (True, True)), (2, (False, True)), (1, (False, False)))):
        found += ranks.run(count, "training.checkpoint", folder=folder, first=first, steps=1, save=save)[0]
    assert found == pytest.approx(ranks.run(1, "training.alone", steps=3)[0], rel=0, abs=1e-5)
