"""Several ranks train as one does, also after a rank was killed, and the model of communication."""

import json

import pytest
import torch
from safetensors.torch import load_file

from metalcore.distributed import model

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


def test_the_others_fail_and_a_restart_does_what_is_missing(ranks, tmp_path):
    from ranks import Ranks

    killed = Ranks(2)
    with pytest.raises(AssertionError, match="rank 0 of launchers.svd:\nTraceback(.|\n)*rank 1 of .*:\nit has died"):
        killed.run(2, "launchers.svd", folder=str(tmp_path), fail_at=2)
    killed.stop()
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("results-of-2/*.safetensors")}
    assert len(kept) in (4, 5)  # rank 0 may have done its part of the batch
    ranks.run(2, "launchers.svd", folder=str(tmp_path))
    report = json.loads((tmp_path / "results-of-2" / "report.json").read_text())
    assert (report["batches done before"], report["batches"]) == (2, 4) and report["largest error"] < 1e-5
    again = {path: path.stat().st_mtime_ns for path in kept}
    assert {path for path in kept if path.name < "000002"} == {path for path in kept if again[path] == kept[path]}
    found = [load_file(path)["S"] for path in sorted(tmp_path.glob("results-of-2/*.safetensors"))]
    given = [load_file(path)["A"] for path in sorted(tmp_path.glob("input/*.safetensors"))]
    torch.testing.assert_close(torch.cat(found), torch.linalg.svdvals(torch.cat(given)), rtol=1e-5, atol=1e-5)


def test_one_device_sends_nothing():
    assert set(model.bytes_of(model.ONE_B, 1).values()) == {0.0}
    assert model.step(model.ONE_B, 1)[1:] == (0.0, 1.0)


def test_bytes_of_two_ranks():
    sent = model.bytes_of(model.ONE_B, 2)
    size = 2 * model.ONE_B.parameters
    assert sent["FSDP2: parameters, forward and backward"] == pytest.approx(size)
    assert sent["FSDP2: gradients"] == pytest.approx(size / 2)
    assert sent["DDP: gradients (in FSDP2's place)"] == pytest.approx(size)


def test_more_devices_are_not_more_efficient():
    kept = [model.step(model.EIGHT_B, ranks)[2] for ranks in (1, 2, 8, 64, 512, 4096)]
    assert kept == sorted(kept, reverse=True) and kept[-1] > 0.5


def test_the_page_has_the_table(request):
    page = (request.config.rootpath / "docs" / "distributed.md").read_text()
    assert "\n".join(model.table()) in page
