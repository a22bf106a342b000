"""python -m metalcore info: what is installed, what it finds on this machine, and how kernels would run."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path


def add_parser(commands):
    parser = commands.add_parser("info", help="versions, devices, backends, kernels, cache, compiler",
                                 description="Prints what is installed and how kernels would run on this machine.")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=run)


def run(arguments):
    found = collect()
    print(json.dumps(found, indent=2) if arguments.json else show(found))


def collect() -> dict:
    """What `info` shows, as plain data."""
    import torch

    import metalcore

    return {
        "versions": {"metalcore": metalcore.__version__, "torch": torch.__version__,
                     "python": platform.python_version(), "platform": platform.platform()},
        "devices": _devices(),
        "backends": _backends(),
        "kernels": _kernels(),
        "compiler": _compiler(),
        "cache": _cache(),
    }


def _devices():
    import torch

    if "metalcore.simulator" in sys.modules:
        mps = "simulated"
    elif torch.backends.mps.is_built():
        mps = "Apple GPU" if torch.backends.mps.is_available() else "built into PyTorch, but no device"
    else:
        mps = "simulated, after `import metalcore.simulator`" if _simulator() else "none"
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"mps": mps, "cuda": cuda, "cpu": f"{platform.machine()}, {torch.get_num_threads()} threads"}


def _simulator():
    from metalcore import _C

    return _C.simulator_info() if hasattr(_C, "simulator_info") else None


def _backends():
    simulator = _simulator()
    if simulator is None:
        state = "not in this build"
    else:
        state = f"{simulator['threads']} threads, {simulator['isa']}" + (", checking" if simulator["checking"] else "")
    return {"simulator": state, "metal": _metal(), "cuda": "not in this version"}


def _metal():
    from metalcore import _C

    if not hasattr(_C, "mps_kernels"):
        return "not in this build"
    return f"{len(_C.mps_kernels())} kernels, GPU family {_C.mps_gpu_family() or 'unknown'}"


def _kernels():
    """The built-in kernel families, each with the variants of its library that are there; none without a simulator."""
    if _simulator() is None:
        return {}
    library = Path(__file__).resolve().parents[1] / "lib"
    families = sorted({path.stem for path in library.glob("*/*.so")})
    return {family: {"kernels": _count(library, family),
                     "built for": sorted(path.parent.name for path in library.glob(f"*/{family}.so"))}
            for family in families}


def _count(library, family):
    from metalcore import _C

    isa = _simulator()["isa"]
    path = library / isa / f"{family}.so"
    return len(_C.simulator_kernels(_C.simulator_load(str(path)))) if path.exists() else 0


def _compiler():
    from metalcore.msl import host
    from metalcore.msl.errors import CompilerNotFoundError

    try:
        return {"found": str(host.find_compiler()), "needed for": "compile_shader; built-in kernels need none"}
    except CompilerNotFoundError as error:
        return {"found": None, "why": str(error)}


def _cache():
    from metalcore.msl import cache

    return {"directory": str(cache.cache_directory())}


def show(found) -> str:
    lines = []
    for section, values in found.items():
        if lines:
            lines.append("")
        lines.append(section)
        if not values:
            lines.append("  none")
        for name, value in values.items():
            lines.append(f"  {name:<12} {_words(value)}")
    return "\n".join(lines)


def _words(value):
    if isinstance(value, dict):
        return ", ".join(f"{_words(item)} {name}" if isinstance(item, int) else f"{name} {_words(item)}"
                         for name, item in value.items())
    return " ".join(value) if isinstance(value, list) else str(value)
