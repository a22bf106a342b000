"""The fixture that tests of metalcore bench share."""

import pytest
import torch

import metalcore
from metalcore.cli.bench import ROOT


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
