"""The kernels that attention's tests run."""

import pytest
from rows import tuned


@pytest.fixture(params=["", "apple7"], ids=["own", "narrow"])
def each_width(request):
    """The device's own kernels, and those whose threads have few registers."""
    with tuned(request.param):
        yield request.param
