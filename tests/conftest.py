"""The device that tests run on: mps (a real one, or the simulated one where PyTorch has none), --device cuda or cpu."""

import collections
import gc
import itertools
import os
import sys

# Processes of pytest-xdist share the cores. torch reads this when it starts its threads.
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
THREADS = max(1, len(os.sched_getaffinity(0)) // WORKERS) if hasattr(os, "sched_getaffinity") else 1
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
# Plans are those of the GPU's family, whatever was measured on this machine.
os.environ["METALCORE_TUNING"] = "0"
# An operator whose results share memory is refused here, as PyTorch refuses it where CI is set and will everywhere.
os.environ.setdefault("TORCHINDUCTOR_ERROR_ON_CUSTOM_OP_ALIASING", "1")

import pytest  # noqa: E402
import torch  # noqa: E402

HAS_MPS = torch._C._has_mps  # the simulated device sets it later
# folder -> the one kind of device that its tests are about
ONLY_ON = {
    "distributed": "simulator",
    "simulator": "simulator",
    "metal_runtime": "simulator",
    "wheels": "simulator",
    "cuda_device": "cuda",
}

# The folders whose tests build something first, or take a minute each: they begin, so that no process of pytest-xdist
# is left with them while the others have nothing to do.
LONGEST = {"metal_runtime", "wheels"}

# The folders whose tests are not of metalcore's own functions. Those of all others use, on the simulated device, only
# what PyTorch has kernels for on a Mac.
LENIENT = {"cli", "cuda", "metal_runtime", "msl", "simulator", "wheels"}


def pytest_addoption(parser):
    parser.addoption("--device", default="mps", choices=["mps", "cuda", "cpu"], help="where tests put their tensors")


def kind(config):
    """ "simulator", "mps" (a real one), "cuda" or "cpu"."""
    device = config.getoption("--device")
    return "simulator" if device == "mps" and not HAS_MPS else device


def pytest_configure(config):
    config.addinivalue_line("markers", "only_on(*kinds): the kinds of device that a test is about")
    config.addinivalue_line(
        "markers", "every_case: all cases of a product of parameters run on the simulated device too"
    )
    config.addinivalue_line("markers", "lenient: the test plans for GPUs on which PyTorch has more ops than on a Mac")
    # With two threads, PyTorch 2.13's batched LU of 150 rows and more is wrong or never returns on CPUs where
    # oneMKL's DLASWP refuses its arguments. The simulator has threads of its own.
    torch.set_num_threads(1)
    if kind(config) == "simulator":
        import metalcore.simulator  # noqa: F401
    if kind(config) == "cuda":
        if not torch.cuda.is_available():
            raise pytest.UsageError("--device cuda: PyTorch sees no CUDA device (torch.cuda.is_available() is False)")
        torch.set_float32_matmul_precision("highest")  # the references must not use TF32,
        torch.backends.cudnn.allow_tf32 = False  # which PyTorch's convolutions do by default


def pytest_ignore_collect(collection_path, config):
    if collection_path.parent == config.rootpath / "tests" and collection_path.name in ONLY_ON:
        return ONLY_ON[collection_path.name] != kind(config) or None
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Keeps the garbage collector from what collection makes: to walk over about a million objects takes a second, in
    which it frees nothing. During the tests it runs more rarely than by default, which was a tenth of their time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000)
        gc.enable()


def pytest_collection_modifyitems(config, items):
    here = kind(config)
    chosen, others = [], []
    for item in items:
        (chosen if all(here in mark.args for mark in item.iter_markers("only_on")) else others).append(item)
    if others:
        config.hook.pytest_deselected(items=others)
    if here == "simulator":
        left_out = set(repeated(chosen))
        config.hook.pytest_deselected(items=[*left_out])
        chosen = [item for item in chosen if item not in left_out]
    items[:] = sorted(chosen, key=lambda item: item.path.parent.name not in LONGEST)


def values(item):
    """What each parametrization of a test, and each fixture with parameters, gives to the case."""
    given = {name: id(value) for name, value in item.callspec.params.items()}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].replace(",", " ").split() if isinstance(mark.args[0], str) else mark.args[0]
        given[tuple(names)] = tuple(given.pop(name) for name in names)
    return list(given.items())


def repeated(items):
    """The cases of products of three or more parametrizations all of whose pairs of values other cases have."""
    products = collections.defaultdict(dict)
    for item in items:
        if hasattr(item, "callspec") and len(chosen := values(item)) > 2:
            products[item.nodeid.partition("[")[0]][item] = set(map(frozenset, itertools.combinations(chosen, 2)))
    for pairs in products.values():
        missing = set().union(*pairs.values())
        while missing:
            best = max(pairs, key=lambda item: len(pairs[item] & missing))  # the first of several
            missing -= pairs.pop(best)
        yield from pairs


@pytest.fixture(scope="session")
def device(request):
    """The device's name, e.g. "mps"."""
    return request.config.getoption("--device")


@pytest.fixture(autouse=True)
def seed():
    """The same random numbers for a test whichever tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def off():
    """No test leaves an override on."""
    yield
    if "metalcore" in sys.modules:
        sys.modules["metalcore"].disable_pytorch_overrides()


@pytest.fixture(autouse=True)
def strict_where_it_matters(request):
    if kind(request.config) == "simulator":
        from metalcore._core.environment import switched_on
        from metalcore.simulator import device

        strict = request.path.parent.name not in LENIENT and not request.node.get_closest_marker("lenient")
        device.set_strict(strict or switched_on("METALCORE_SIMULATOR_STRICT"))


@pytest.fixture(params=["", "apple7"], ids=["own", "narrow"])
def each_width(request):
    """The device's own kernels of attention, and those whose threads have few registers."""
    from rows import tuned  # which asks metalcore

    with tuned(request.param):
        yield request.param
