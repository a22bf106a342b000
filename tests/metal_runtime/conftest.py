import fcntl

import pytest


@pytest.fixture(scope="session")
def extension():
    """The extension's path. Processes of pytest-xdist build it one after the other, the first of them really."""
    import build_runtime

    build_runtime.WORK.mkdir(parents=True, exist_ok=True)
    with open(build_runtime.WORK / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return build_runtime.build()
