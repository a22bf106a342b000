"""Puts the extension of build_runtime.py in metalcore._C's place, in this process: `use_runtime.start()`, or for pytest
`-p use_runtime`. The extension's path is in $METALCORE_TEST_EXTENSION, this folder in $PYTHONPATH."""

import collections
import ctypes
import functools
import importlib.machinery
import importlib.util
import inspect
import os
import sys

import pytest

_library = None


def start():
    """Loads the extension, and makes PyTorch's ops on the simulated device wait for the streams' work, as on a Mac."""
    load()
    connect()


def load():
    import torch  # noqa: F401 - the extension needs its libraries

    loader = importlib.machinery.ExtensionFileLoader("metalcore._C", os.environ["METALCORE_TEST_EXTENSION"])
    sys.modules["metalcore._C"] = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))


def connect():
    global _library
    import metalcore.simulator  # noqa: F401
    from metalcore.simulator import device

    _library = ctypes.CDLL(os.environ["METALCORE_TEST_EXTENSION"])
    for function in (_library.metal_runtime_counts, _library.metal_runtime_fault, _library.metal_runtime_compiled):
        function.restype = ctypes.c_char_p
    device._extension.set_queue(ctypes.addressof(ctypes.c_char.in_dll(_library, "metal_runtime_queue")))


def set_stream(number):
    """Of this thread."""
    _library.metal_runtime_set_stream(number)


def set_concurrent(on):
    """Whether PyTorch's encoders run dispatches in another order, up to a barrier."""
    _library.metal_runtime_set_concurrent(on)


def set_captured(on):
    """Whether PyTorch captures a graph on the encoders that it opens from now on."""
    _library.metal_runtime_set_captured(on)


def set_slowness(factor):
    """Multiplies the time that dispatches take by the cost model."""
    _library.metal_runtime_set_slowness(ctypes.c_double(factor))


def commits(stream=0):
    """How often the backend had a stream commit."""
    return _library.metal_runtime_commits(stream)


def counts():
    """(encoders opened on each stream, dispatches on each, names of the kernels dispatched) so far."""
    encoders, dispatches, kernels = _library.metal_runtime_counts().decode().split(";")
    return [*map(int, encoders.split())], [*map(int, dispatches.split())], set(kernels.split())


def made():
    """(allocations of device memory, look-ups of pipelines) so far."""
    return _library.metal_runtime_allocations(), _library.metal_runtime_look_ups()


def compiled():
    """(programs compiled from their source, instantiations of kernels that they had) so far."""
    return tuple(map(int, _library.metal_runtime_compiled().decode().split()))


def add_device():
    """Where METAL_RUNTIME_DEVICES=0 had none."""
    _library.metal_runtime_add_device()


def fault(name):
    """The error that a fault of faults.mm causes; "" if none."""
    return _library.metal_runtime_fault(name.encode()).decode()


# pytest's side -------------------------------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests():  # a conftest.py may import metalcore
    load()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session):
    connect()


def pytest_collection_modifyitems(config, items):
    """Keeps one of $METALCORE_TEST_EVERY of each file's cases that use the device. All run on the simulator's backend,
    whose numbers they are; what is special here is how dispatches are encoded, which hardly depends on them."""
    every = int(os.environ["METALCORE_TEST_EVERY"])
    seen = collections.Counter()
    kept, left_out = [], []
    source_of = functools.cache(inspect.getsource)  # a test has one for all its parameters
    for item in items:
        source = source_of(item.function)
        used = "device" in item.fixturenames or '"mps"' in source
        used = used and "subprocess" not in source  # other processes would use the simulator's backend
        (kept if used and seen[item.path] % every == 0 else left_out).append(item)
        seen[item.path] += used
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


@pytest.fixture(autouse=True)
def stream_is_finished():
    """Runs the work that a test leaves on the stream, so that an error in it belongs to this test. No kernel may have
    been left to PyTorch."""
    import torch

    from metalcore import _C

    yield
    torch.mps.synchronize()
    assert not _C.mps_refused()
