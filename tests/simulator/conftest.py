"""Fixtures that tests of the simulator share."""

import pytest

from metalcore import _C


@pytest.fixture(params=[1, 2])
def thread_count(request):
    """Gives the executor this many threads."""
    before = _C.simulator_info()["threads"]
    _C.simulator_set_num_threads(request.param)
    yield request.param
    _C.simulator_set_num_threads(before)


@pytest.fixture(scope="module")
def compiled_at_once():
    """All kernels of a program are compiled at once, for tests that run all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("metalcore.msl.runtime.targets.COMPILED_AT_ONCE", 1000)
        yield
