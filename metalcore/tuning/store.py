"""The file of measured values: JSON in the cache directory, one for each GPU.

A file that was measured with other kernels, on another GPU, or that was damaged is not used, with a warning that says
why. No value in a file can make a result wrong: csrc/gpu/tunable.h says which are legal, to `tune` and to this module.

A process reads it before the first plan for a device. METALCORE_TUNING=0 leaves it out: plans are then those for the
GPU's family.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import secrets
import subprocess
import threading
import warnings
from pathlib import Path

import torch

from .. import _C
from .._core.environment import switched_on
from .._system import __version__
from ..mac_kernels import lacking, this_release
from ..msl import cache
from ..msl.private_files import open_file, opened_directory

__all__ = ["GPU", "Gains", "Value", "Values", "gains", "is_on", "load", "save", "state", "this_gpu", "use", "value_of"]

FORMAT = 1
FAMILY = "the rows of the GPU's family"
NO_LIMIT = 2**63 - 1  # null in files

Value = int | list[list[int | None]]  # a number, or regions of four: above, up_to, min_batch, max_batch
Values = dict[str, Value]  # by "table.field"
Gains = dict[str, tuple[float, float | None]]  # of overrides: PyTorch's time over ours in inference, and in training
_state: dict[str, str] = {}


class GPU:
    """What a file is for.

    Attributes:
        device_type: "mps" or "cuda".
        name: the GPU's name, and the number of its cores where PyTorch knows it.
        family: the family whose rows the tuning began with, or "".
    """

    def __init__(self, device_type: str, name: str):
        self.device_type, self.name = device_type, name
        self.family = _C.gpu_family(device_type)

    @property
    def path(self) -> Path:
        directory = cache.cache_directory() if cache.problem() is None else cache.temporary_directory()
        word = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")
        return directory / f"tuning-{self.device_type}-{word}.json"

    def identity(self) -> dict[str, str]:
        """Returns what has to be as it was when the values were measured."""
        return {"metalcore": __version__, "kernels": _kernels_digest(self.device_type), "GPU": self.name}


def this_gpu(device_type: str) -> GPU | None:
    """Returns the GPU that ops on this type of device run on, or None if there is none."""
    if device_type == "cuda":
        if torch.cuda.is_initialized():
            return GPU(device_type, torch.cuda.get_device_name())
        devices = _C.cuda_info().get("devices")  # this makes no context, unlike PyTorch's own question
        return GPU(device_type, devices[0]["name"]) if devices else None
    if not hasattr(_C, "mps_kernels"):
        return GPU(device_type, f"simulator {_C.simulator_info()['isa']}")
    if hasattr(torch.backends.mps, "get_name"):
        return GPU(device_type, f"{torch.backends.mps.get_name()}, {torch.backends.mps.get_core_count()} cores")
    command = ["sysctl", "-n", "machdep.cpu.brand_string"]
    name = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return GPU(device_type, name or platform.machine())


def _kernels_digest(device_type):
    """Returns a digest of the plans and kernels in this build."""
    package = Path(_C.__file__).parent
    folder = "cuda" if device_type == "cuda" else "metal" if hasattr(_C, "mps_kernels") else _C.simulator_info()["isa"]
    combined = hashlib.sha256(Path(_C.__file__).read_bytes())
    for path in sorted((package / "lib" / folder).rglob("*")):
        if path.is_file():
            combined.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return combined.hexdigest()[:16]


def load(device_type: str) -> None:
    """Uses the values that were measured on this GPU, if there are any. It warns of a file that it does not use."""
    gpu = this_gpu(device_type)
    if gpu is None or not gpu.path.exists():
        return
    try:
        content = read(gpu)
        use(gpu, content["values"])
    except (OSError, ValueError) as error:
        _state[device_type] = f"{FAMILY}; {gpu.path} is not used: {error}"
        warnings.warn(
            f"metalcore: {gpu.path} is not used: {error}. `python -m metalcore tune` measures again; "
            "METALCORE_TUNING=0 leaves the file alone.",
            RuntimeWarning,
            stacklevel=3,
        )
    else:
        _state[device_type] = f"measured on this machine on {content['date']}: {gpu.path}"


def read(gpu: GPU) -> dict:
    """Returns a file's content.

    Raises:
        OSError: it cannot be read, or others could have written it.
        ValueError: it is damaged, or was not measured with this build on this GPU.
    """
    with opened_directory(gpu.path.parent) as folder:
        descriptor = open_file(folder, gpu.path, os.O_RDONLY)
    with open(descriptor, "rb") as file:
        text = file.read()
    try:
        content = json.loads(text)
        identity, values = content["identity"], content["values"]
        if content["format"] != FORMAT or not isinstance(identity, dict) or not isinstance(values, dict):
            raise KeyError
        if not isinstance(content["family"], str) or not isinstance(content["date"], str):
            raise KeyError
        for inference, training in content.get("overrides", {"gains": {}})["gains"].values():
            if not isinstance(inference, (int, float)) or not isinstance(training, (int, float, type(None))):
                raise KeyError
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ValueError("it is damaged") from None
    for name, now in gpu.identity().items():
        if identity.get(name) != now:
            raise ValueError(f"it was measured with {name} {identity.get(name)}, and here it is {now}")
    if content["family"] != gpu.family:
        raise ValueError(f"it was measured for GPU family {content['family']!r}, and here it is {gpu.family!r}")
    return content


def use(gpu: GPU, values: Values) -> None:
    """Makes ops on the GPU plan with these values from now on, and with the family's for all other fields.

    Raises:
        ValueError: a field does not exist, or its value is not legal. Nothing changes.
    """
    rows = []
    for name, value in values.items():
        table, _, field = name.partition(".")
        rows.append((table, field, _numbers(name, value)))
    _C.use_measured(gpu.device_type, gpu.family, rows)


def _numbers(name, value):
    """Returns a value as csrc/gpu/tunable.h has it: a list of numbers."""
    if isinstance(value, list):
        if not all(isinstance(region, list) and len(region) == 4 for region in value):
            raise ValueError(f"{name}: {value} is not a list of regions")
        numbers = [NO_LIMIT if number is None else number for region in value for number in region]
    else:
        numbers = [value]
    if not all(type(number) is int and abs(number) <= NO_LIMIT for number in numbers):
        raise ValueError(f"{name}: {value} is not made of whole numbers")
    return numbers


def present(gpu: GPU) -> Values:
    """Returns the values of the GPU's file; none where it is missing or not used."""
    try:
        return read(gpu)["values"]
    except (OSError, ValueError):
        return {}


def gains(device_type: str) -> Gains:
    """Returns what was measured of overrides on this GPU, with this PyTorch."""
    if not files(device_type):
        return {}
    gpu = this_gpu(device_type)
    return present_gains(gpu) if gpu else {}


def files(device_type: str) -> bool:
    """Returns whether anything was measured on GPUs of a type, which costs less to ask than which GPU is here."""
    directories = (cache.cache_directory(), cache.temporary_directory())
    return any(path for directory in directories for path in directory.glob(f"tuning-{device_type}-*.json"))


def present_gains(gpu: GPU) -> Gains:
    """Returns the gains of overrides in the GPU's file; none where it is missing, not used or of another PyTorch."""
    try:
        overrides = read(gpu).get("overrides", {})
        if overrides.get("torch") != torch.__version__:
            return {}
        return {name: (inference, training) for name, (inference, training) in overrides["gains"].items()}
    except (OSError, ValueError):
        return {}


def forget(gpu: GPU) -> bool:
    """Removes the GPU's file; whether there was one."""
    if not gpu.path.exists():
        return False
    gpu.path.unlink()
    _C.use_measured(gpu.device_type, gpu.family, [])
    _state[gpu.device_type] = FAMILY
    return True


def value_of(entry: dict) -> Value:
    """Returns the value in an entry of _C.tunables()."""
    numbers = entry["value"]
    if entry["kind"] != "regions":
        return numbers[0]
    limits = [None if number == NO_LIMIT else number for number in numbers]
    return [limits[i : i + 4] for i in range(0, len(limits), 4)]


def save(gpu: GPU, values: Values, date: str, gains: Gains | None = None) -> Path:
    """Writes the file, as a whole or not at all, and returns its path."""
    path = gpu.path
    content = {"format": FORMAT, "date": date, "identity": gpu.identity(), "family": gpu.family, "values": values}
    content["overrides"] = {"torch": torch.__version__, "gains": gains or {}}
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with opened_directory(path.parent) as folder:
        with open(open_file(folder, partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w") as file:
            json.dump(content, file, indent=2)
            file.write("\n")
        os.replace(partial.name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
    _state[gpu.device_type] = f"measured on this machine on {date}: {path}"
    return path


def state(device_type: str) -> str:
    """Returns whether measured values are in use, in words."""
    if not is_on():
        return f"{FAMILY} (METALCORE_TUNING=0)"
    _C.tunables(device_type)  # it loads them, if nothing did before
    return _state.get(device_type, FAMILY)


_lock = threading.RLock()
_asked: set[str] = set()


def is_on() -> bool:
    """Returns whether this process uses measured values."""
    return switched_on("METALCORE_TUNING", default=True)


def _load(device_type):
    """Loads the measured values of a type of device once. The extension calls it from any thread, and all wait for
    the first of them."""
    with _lock:
        if device_type not in _asked and is_on():
            _asked.add(device_type)
            if files(device_type):
                load(device_type)


_C.set_measured_loader(_load)
_C.set_lacking("mps", lacking(this_release()))
