"""A plugin of pytest: of a test's cases, every fourth runs. All of them run on the simulated device, with the same
kernels and recordings."""

from collections import Counter

EVERY = 4


def pytest_collection_modifyitems(config, items):
    seen, kept, left_out = Counter(), [], []
    for item in items:
        test = item.nodeid.partition("[")[0]
        (left_out if seen[test] % EVERY else kept).append(item)
        seen[test] += 1
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept
