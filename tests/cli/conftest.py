"""The fixture that tests of metalcore bench share."""

from pathlib import Path

import pytest
import torch

import metalcore

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def as_before(monkeypatch):
    """Restores the path and the numbers of threads of this process, which a run sets."""
    monkeypatch.syspath_prepend(str(ROOT))
    threads = torch.get_num_threads()
    simulator = metalcore._C.simulator_info()["threads"] if hasattr(metalcore._C, "simulator_info") else None
    yield
    torch.set_num_threads(threads)
    if simulator:
        metalcore._C.simulator_set_num_threads(simulator)
