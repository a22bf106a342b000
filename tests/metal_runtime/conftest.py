import fcntl

import pytest


@pytest.fixture(scope="session")
def extension():
    """The extension's path. Processes of pytest-xdist take turns, and the first one builds it."""
    import build_runtime

    build_runtime.WORK.mkdir(parents=True, exist_ok=True)
    with open(build_runtime.WORK / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return build_runtime.build()
