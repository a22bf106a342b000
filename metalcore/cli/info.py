"""python -m metalcore info: the installed versions, the devices of this machine, and how kernels would run."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

from .. import _system


def add_parser(commands):
    parser = commands.add_parser(
        "info",
        help="versions, devices, backends, kernels, cache, compiler",
        description="Prints the installed versions and how kernels would run on this machine.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(run=run)


def run(arguments):
    report = collect()
    print(json.dumps(report, indent=2) if arguments.json else show(report))


def collect() -> dict:
    """Returns what `info` shows as plain data."""
    import torch

    import metalcore

    return {
        "versions": {
            "metalcore": metalcore.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
        },
        "devices": _devices(),
        "backends": _backends(),
        "kernels": _kernels(),
        **_refused(),
        "compiler": _compiler(),
        "cache": _cache(),
        "tuning": _tuning(),
    }


def _devices():
    import torch

    if "metalcore.simulator" in sys.modules:
        mps = "simulated"
    elif torch.backends.mps.is_built():
        mps = "Apple GPU" if torch.backends.mps.is_available() else f"none: {_system.no_mps() or 'no device'}"
    else:
        mps = "simulated, after `import metalcore.simulator`" if _simulator() else "none"
    return {"mps": mps, "cuda": _cuda_devices(), "cpu": f"{platform.machine()}, {torch.get_num_threads()} threads"}


def _cuda_devices():
    cuda = _cuda()
    if cuda is None or not cuda.get("devices"):
        return "none"
    return ", ".join(
        f"{device['name']} (compute capability {device['arch'] // 10}.{device['arch'] % 10}, "
        f"{device['memory'] / 2**30:.0f} GiB)"
        for device in cuda["devices"]
    )


def _cuda():
    """Returns what the CUDA backend knows of the driver and its devices; None where this build has no CUDA backend."""
    from metalcore import _C

    return _C.cuda_info() if hasattr(_C, "cuda_info") else None


def _simulator():
    from metalcore import _C

    return _C.simulator_info() if hasattr(_C, "simulator_info") else None


def _backends():
    from metalcore._core.routing import DEVICES

    simulator = _simulator()
    if simulator is None:
        state = "not in this build"
    else:
        state = f"{simulator['threads']} threads, {simulator['isa']}" + (", checking" if simulator["checking"] else "")
        if "mps" not in DEVICES:
            state += "; no built-in kernels for this CPU (METALCORE_ISA), so PyTorch's ops run in their place"
    return {
        "simulator": state,
        "simulated device": _simulated_device(),
        "metal": _metal_backend(),
        "cuda": _cuda_backend(),
    }


def _simulated_device():
    """Returns whether the extension that makes `mps` tensors on Linux is there for this PyTorch."""
    import torch

    from metalcore import _device_library

    if _simulator() is None:
        return "not in this build"
    if library := _device_library.find():
        return f"compiled for torch {torch.__version__}: {library}"
    return (
        f"not compiled for torch {torch.__version__} yet: the first `import metalcore.simulator` does that, once, "
        "with a C++ compiler and Python's headers"
    )


def _cuda_backend():
    import torch

    from metalcore.msl.errors import CompilerNotFoundError
    from metalcore.msl.nvidia import nvrtc

    cuda = _cuda()
    if cuda is None:
        return "not in this build"
    if "reason" in cuda:
        return cuda["reason"].removeprefix("metalcore: ")
    if torch.version.cuda is None:
        return f"driver for CUDA {cuda['driver']}; but this PyTorch is built without CUDA"
    try:
        compiler = repr(nvrtc.find())
    except CompilerNotFoundError as error:
        compiler = str(error)
    return f"driver for CUDA {cuda['driver']}, {compiler}"


def _metal_backend():
    from metalcore import _C

    if not hasattr(_C, "mps_kernels"):
        return "not in this build"
    return f"{len(_C.mps_kernels())} kernels, GPU family {_C.mps_gpu_family() or 'unknown'}"


def _refused():
    """Returns the families that Metal has refused, with its messages, where there is Metal."""
    from metalcore import _C
    from metalcore._core import refused

    return {"refused by Metal": refused.families()} if hasattr(_C, "mps_refused") else {}


def _kernels():
    """Returns the built-in kernel families, each with its number of kernels and the targets that its library is built
    for."""
    from metalcore.msl.nvidia import cuda

    library = Path(__file__).resolve().parents[1] / "lib"
    programs = cuda.builtin_programs() if _cuda() is not None else {}
    built = {family: ["cuda"] for family in programs}
    for path in library.glob("*/**/*.so") if _simulator() else ():
        isa, *family = path.relative_to(library).with_suffix("").parts
        built.setdefault("/".join(family), []).append(isa)
    return {
        family: {
            "kernels": len(programs[family][1]) if family in programs else _count(library, family),
            "built for": sorted(built[family]),
        }
        for family in sorted(built)
    }


def _count(library, family):
    from metalcore import _C

    path = library / _C.simulator_info()["isa"] / f"{family}.so"
    return len(_C.simulator_kernels(_C.simulator_load(str(path)))) if path.exists() else 0


def _compiler():
    """Returns the C++ compiler, Python's headers, and what needs them on this machine."""
    from metalcore import _device_library
    from metalcore.msl.errors import CompilerNotFoundError
    from metalcore.msl.runtime import host

    if _simulator() is None:
        needed_for = "nothing"
    elif _device_library.find():
        needed_for = "compile_shader on the simulator"
    else:
        needed_for = "the first import of metalcore.simulator with this PyTorch; compile_shader on the simulator"
    headers = _device_library.python_headers()
    compiler = reason = None
    try:
        compiler = str(host.find_compiler())
    except CompilerNotFoundError as error:
        reason = str(error)
    return {
        "found": compiler,
        "why": reason,
        "needed for": needed_for,
        "Python.h": "missing" if headers is None else f"in {headers}",
    }


def _cache():
    from metalcore.msl import cache

    directory = cache.cache_directory()
    contents = {"directory": str(directory), "not used": cache.problem()}
    for suffix, what in (("so", "simulator"), ("cubin", "cuda")):
        sizes = [path.stat().st_size for path in directory.glob(f"[!._]*.{suffix}")]
        contents[what] = f"{len(sizes)} programs, {sum(sizes) / 2**20:.1f} MiB"
    return contents


def _tuning():
    """Returns, by type of device, whether plans use what `tune` measured."""
    from metalcore._core.routing import DEVICES
    from metalcore.tuning import store

    return {device: store.state(device) if device in DEVICES else None for device in ("mps", "cuda")}


def show(report) -> str:
    """Returns what collect() found as text, without the values that are None."""
    lines = []
    for section, values in report.items():
        if lines:
            lines.append("")
        lines.append(section)
        if not values:
            lines.append("  none")
        for name, value in values.items():
            if value is not None:
                lines.append(f"  {name:<16} {_words(value)}")
    return "\n".join(lines)


def _words(value):
    if isinstance(value, dict):
        return ", ".join(
            f"{_words(item)} {name}" if isinstance(item, int) else f"{name} {_words(item)}"
            for name, item in value.items()
        )
    return " ".join(value) if isinstance(value, list) else str(value)
