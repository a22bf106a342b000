"""What PyTorch has for its operators on a Mac, by the table from which it generates them (torchgen's)."""

import functools
import importlib.util
from pathlib import Path

import torch


@functools.cache
def kernels():
    """Returns the operators with an MPS kernel in this release, by names like "aten::add.out".

    Raises RuntimeError where the table, or PyYAML to read it with, is missing.
    """
    functions = {function["func"].split("(", 1)[0]: function for function in read_table()}

    def has_kernel(name):
        # A structured operator has the kernels of the out variant that it delegates to.
        source = functions[functions[name].get("structured_delegate", name)]
        return any("MPS" in keys.split(", ") for keys in source.get("dispatch", {}))

    return {f"aten::{name}" for name in functions if has_kernel(name)}


def on_cpu():
    """Returns the operators that a Mac runs on the CPU whatever the environment says. PyTorch registers them by hand,
    in ATen/mps/MPSFallback.mm."""
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return {"aten::embedding_renorm_"} | ({"aten::linalg_svd", "aten::linalg_svd.U"} if release < (2, 14) else set())


def read_table():
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
