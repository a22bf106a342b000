"""The device that tests run on: a real GPU where there is one, the simulated `mps` device everywhere else."""

import os

# Before torch starts its threads: processes of pytest-xdist share the cores.
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
THREADS = max(1, len(os.sched_getaffinity(0)) // WORKERS) if hasattr(os, "sched_getaffinity") else 1
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))

import importlib.machinery  # noqa: E402
import importlib.util  # noqa: E402
import sys  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402

if extension := os.environ.get("METALCORE_TEST_EXTENSION"):  # another build of metalcore._C: tests/metal_runtime
    loader = importlib.machinery.ExtensionFileLoader("metalcore._C", extension)
    sys.modules["metalcore._C"] = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))

collect_ignore = ["simulator"] if torch._C._has_mps else []


def pytest_addoption(parser):
    parser.addoption("--device", default="mps", help="where tests put their tensors: mps (default), cuda or cpu")


def pytest_configure(config):
    torch.set_num_threads(THREADS)
    if config.getoption("--device") == "mps" and not torch.backends.mps.is_available():
        import metalcore.simulator  # noqa: F401


@pytest.fixture(scope="session")
def device(request):
    """The device's name, e.g. "mps"."""
    return request.config.getoption("--device")


@pytest.fixture(autouse=True)
def seed():
    """The same random numbers for a test whichever tests ran before it."""
    torch.manual_seed(0)
