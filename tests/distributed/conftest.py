import os
import sys

import pytest


@pytest.fixture(scope="session")
def ranks():
    """Four processes that run checks as the ranks of a group."""
    from ranks import Ranks

    # The server that forks them finds its modules by the environment.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([os.path.dirname(__file__), *sys.path]))
        made = Ranks(4)
    yield made
    made.stop()
