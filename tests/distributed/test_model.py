"""The model of communication."""

import pytest

from metalcore.distributed import model


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
