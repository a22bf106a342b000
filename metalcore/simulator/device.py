"""Installs the simulated device, here and in child processes, and gives torch._C the functions of a PyTorch build with
MPS that others lack."""

import atexit
import contextlib
import functools
import importlib.machinery
import importlib.util
import os
import sys
import warnings
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, cast

import torch

from .. import _C, _device_library
from .._backends import DEVICES
from .._core import torch_operators
from .._core.environment import switched_on

OLDEST_TORCH = (2, 10)
HERE = Path(__file__).resolve().parent
AUTOLOAD = HERE / "autoload"  # names the entry point, for a checkout that is not installed
_extension = None
_strict = None  # whether the device is strict, once it is there


def install():
    """Makes `torch.device("mps")` work, once per process.

    Raises RuntimeError before anything has changed, where the device would not be sound.
    """
    global _extension
    if getattr(torch._C, "_metalcore_simulates_mps", False):
        return
    refuse_if_unsound()
    extension = load_extension()
    if extension.autograd_started_without_device():
        raise RuntimeError(
            "metalcore.simulator must be imported before the first backward(): PyTorch's autograd "
            "engine has started and counted the devices without the simulated one"
        )
    strict = switched_on("METALCORE_SIMULATOR_STRICT")
    if strict:
        mac_operators()  # raises where there is no table
    extension.install()
    _extension = extension
    torch_operators.simulated_kernels = lambda: mac_operators() | mac_operators_on_cpu()
    set_strict(strict)
    if hasattr(_C, "simulator_set_device_functions"):
        _C.simulator_set_device_functions(*extension.functions())
    complete_torch_c(extension)
    simulate_storages()
    # Otherwise a process that ends right after backward() would abort: see csrc/simulated_device/hooks.h.
    atexit.register(extension.drain_autograd)
    if "mps" not in DEVICES:
        warnings.warn(
            "metalcore was built without kernels for the simulator on this CPU (METALCORE_ISA): metalcore's "
            "functions are PyTorch's on the simulated device. compile_shader runs kernels of your own",
            RuntimeWarning,
            stacklevel=3,
        )
    if (overrides := sys.modules.get("metalcore.overrides")) is not None:
        overrides.refresh()


def set_strict(strict):
    """Makes the device refuse the operators that PyTorch has no kernel for on a Mac, or take them again. Returns
    whether it refused them before.

    No aten operator may have an MPS kernel of somebody else's (an active override) meanwhile.
    """
    global _strict
    before = _strict
    if strict != before:
        assert _extension is not None
        if strict:
            _extension.be_strict(mac_operators(), mac_operators_on_cpu())
        else:
            _extension.be_lenient()
        _strict = strict
    return before


def reach_children():
    """Gives the device to the processes that inherit this one's environment, whatever starts them, unless
    METALCORE_SIMULATOR says 0.

    `import torch` calls the entry points of the group `torch.backends`, and metalcore's entry point loads the device
    where METALCORE_SIMULATOR=1 (metalcore_autoload.py). This is PyTorch's own way to find backends: processes that
    never import torch start as before, and it does not collide with a sitecustomize of the environment.
    TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns it off, as for other backends.
    """
    os.environ.setdefault("METALCORE_SIMULATOR", "1")
    if any(entry.value == "metalcore_autoload:load" for entry in entry_points(group="torch.backends")):
        return
    before = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    ours = [str(path) for path in (AUTOLOAD, HERE.parents[1]) if str(path) not in before]
    os.environ["PYTHONPATH"] = os.pathsep.join([*before, *ours])
    sys.path += ours  # multiprocessing hands it to the children that it spawns


def refuse_if_unsound():
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if release < OLDEST_TORCH:
        raise RuntimeError(
            f"metalcore.simulator needs torch {'.'.join(map(str, OLDEST_TORCH))} or newer, found {torch.__version__}"
        )
    if torch._C._has_mps:
        raise RuntimeError("metalcore.simulator: this PyTorch has a real MPS backend, which needs no simulation")
    if not sys.platform.startswith("linux"):
        raise RuntimeError(f"metalcore.simulator runs on Linux, not on {sys.platform}")
    if switched_on("METALCORE_HIDE_CUDA"):
        # The driver reads this once, so it helps only where nothing has asked for devices before.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    present = torch._C._get_accelerator().type
    if present == "cuda":
        if torch.cuda.is_available():
            raise RuntimeError(
                "metalcore.simulator: PyTorch supports one accelerator at a time, and this process has "
                "a CUDA device. Set METALCORE_HIDE_CUDA=1 (or CUDA_VISIBLE_DEVICES=) in the "
                "environment before the program starts to run it on the simulated device instead."
            )
    elif present != "cpu":
        raise RuntimeError(
            f"metalcore.simulator: PyTorch supports one accelerator at a time, and this one has {present!r}"
        )


def load_extension():
    path = _device_library.find_or_build()
    loader = importlib.machinery.ExtensionFileLoader("metalcore.simulator._device", str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def compile_shader(source):
    import metalcore

    return metalcore.compile_shader(source)


def not_simulated(what):
    def raises(*args, **kwargs):
        raise RuntimeError(f"The simulated MPS device has no {what}")

    return raises


def complete_torch_c(extension):
    def host_alias_storage(storage):
        tensor = torch.empty(0, dtype=torch.uint8, device="mps").set_(storage)
        return extension.host_alias(tensor).untyped_storage()

    members = {
        "_metalcore_simulates_mps": True,
        "_mps_get_name": lambda: "Apple GPU (simulated by metalcore)",
        "_mps_get_core_count": lambda: os.cpu_count(),
        "_mps_host_alias_storage": host_alias_storage,
        "_mps_compileShader": compile_shader,
        "_mps_loadMetalllib": not_simulated("binary Metal libraries: pass the source to compile_shader()"),
        "_mps_loadMetallibFromPath": not_simulated("binary Metal libraries: pass the source to compile_shader()"),
        "_mps_isCaptureEnabled": lambda: False,
        "_mps_isCapturing": lambda: False,
        "_mps_startCapture": not_simulated("Metal capture"),
        "_mps_stopCapture": not_simulated("Metal capture"),
    }
    for name, value in members.items():
        setattr(torch._C, name, value)
    if hasattr(torch.mps, "streams"):
        simulate_streams()
    keep_random_state()
    torch._C._has_mps = True
    for name in ("is_available", "is_macos_or_newer", "is_macos13_or_newer", "get_name", "get_core_count"):
        cached = getattr(torch.backends.mps, name, None)
        if cached is not None and hasattr(cached, "cache_clear"):
            cached.cache_clear()


def keep_random_state():
    """Gives torch.mps what torch.utils.checkpoint asks for before it keeps the state of a device's random numbers.
    PyTorch's own has it not: metalcore/doctor/routes.py."""
    mps = cast(Any, torch.mps)
    if not hasattr(mps, "_initialized"):
        mps._initialized = True
    if not hasattr(mps, "device"):
        mps.device = lambda index: contextlib.nullcontext()  # there is one device


def simulate_streams():
    """Gives newer versions of PyTorch a torch.mps.Stream: the device has one stream."""

    class Stream(torch.Stream):
        def __new__(cls, *args, **kwargs):
            return super().__new__(cls, device="mps")  # pyright: ignore[reportCallIssue]

        def __init__(self, *args, **kwargs):
            pass

    c, mps = cast(Any, torch._C), cast(Any, torch.mps)  # whose stubs have no streams
    c._mps_getCurrentStream = Stream
    c._mps_setStream = lambda stream: None
    mps.Stream = mps.streams.Stream = c._MPSStreamBase = Stream


def simulate_storages():
    """Replaces UntypedStorage(device="mps"), by which torch.load, deepcopy and pickle allocate: its C++ has no case
    for MPS."""
    original: Any = torch.UntypedStorage.__new__

    def new(cls, *args, device=None, **kwargs):
        if device is None:
            return original(cls, *args, **kwargs)
        if torch.device(device).type != "mps":
            return original(cls, *args, device=device, **kwargs)
        content = args[0] if args else kwargs.get("size", 0)
        if isinstance(content, int):
            return torch.empty(content, dtype=torch.uint8, device="mps").untyped_storage()
        return torch.tensor(list(content), dtype=torch.uint8, device="mps").untyped_storage()

    torch.UntypedStorage.__new__ = new


@functools.cache
def mac_operators():
    """Returns the operators with an MPS kernel in this release, by names like "aten::add.out". They stand in the table
    from which PyTorch generates them (torchgen's).

    Raises RuntimeError where the table, or PyYAML to read it with, is missing.
    """
    functions = {function["func"].split("(", 1)[0]: function for function in read_mac_table()}

    def has_kernel(name):
        # A structured operator has the kernels of the out variant that it delegates to.
        source = functions[functions[name].get("structured_delegate", name)]
        return any("MPS" in keys.split(", ") for keys in source.get("dispatch", {}))

    return {f"aten::{name}" for name in functions if has_kernel(name)}


def mac_operators_on_cpu():
    """Returns the operators that a Mac runs on the CPU whatever the environment says. PyTorch registers them by hand,
    in ATen/mps/MPSFallback.mm."""
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return {"aten::embedding_renorm_"} | ({"aten::linalg_svd", "aten::linalg_svd.U"} if release < (2, 14) else set())


def read_mac_table():
    try:
        import yaml
    except ImportError:
        raise RuntimeError(
            "METALCORE_SIMULATOR_STRICT: torchgen's table of operators needs PyYAML (pip install pyyaml)"
        ) from None
    spec = importlib.util.find_spec("torchgen")
    places = (spec.submodule_search_locations or []) if spec else []
    for place in places:
        path = Path(place, "packaged", "ATen", "native", "native_functions.yaml")
        if path.exists():
            return yaml.load(path.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    raise RuntimeError(
        f"METALCORE_SIMULATOR_STRICT: torch {torch.__version__} comes without torchgen's table of operators"
    )
