"""PyTorch's own tests of Inductor through the backend metalcore, on the simulated device.

    python tests/programs/inductor_compiled.py FILE [--only TEXT] [--every N] [--first K] [--dynamic]

FILE is test/inductor/test_torchinductor.py of PyTorch's repository, of a version near the installed one. The tests of
its CommonTemplate are run. Each agrees, falls back (PyTorch runs a graph, with the reason), cannot be judged (it fails
with the backend "eager", too, as those that look into Inductor itself), or is wrong.
"""

import argparse
import ast
import importlib
import importlib.util
import inspect
import sys
import time
import unittest
import warnings
from collections import Counter
from pathlib import Path

import torch

from metalcore import programs

# A word of tests that compile C++ for ahead-of-time use.
OWN = "aoti"


def load(path, device):
    """PyTorch's file as a module, whose GPU is `device`. Names that it imports and this PyTorch lacks are made up."""
    for node in ast.parse(Path(path).read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch."):
            source = importlib.import_module(node.module)
            for name in [name.name for name in node.names if not hasattr(source, name.name)]:
                if not hasattr(source, "__path__") or importlib.util.find_spec(f"{node.module}.{name}") is None:
                    setattr(source, name, _made_up)
    spec = importlib.util.spec_from_file_location("test_torchinductor", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    for name in [name for name in vars(module) if name.endswith("U_TYPE")]:
        setattr(module, name, device)
    return module


def _made_up(*args, **kwargs):
    """As a decorator, with arguments or without, it changes nothing."""
    return args[0] if args and callable(args[0]) else _made_up


def tests(module):
    """The names of the tests that any backend should pass."""
    for name, function in vars(module.CommonTemplate).items():
        if name.startswith("test_") and OWN not in inspect.getsource(function):
            yield name


def outcome(module, name, device):
    """("agrees" | "falls back" | "not judged" | "wrong", why)."""
    with programs.observe() as graphs:
        failure = _run(module, name, device, programs.backend.backend)
    if failure and failure[0] == "skipped":
        return "not judged", failure[1]
    if failure:
        if again := _run(module, name, device, lambda graph, inputs: graph.forward):
            return "not judged", f"eager, too: {again[1]}"
        return "wrong", failure[1]
    left = [note for graph in graphs for note in graph.notes if note.startswith("PyTorch runs")]
    if left or not any(graph.programs for graph in graphs):
        return "falls back", (left or ["there is no graph"])[0]
    return "agrees", ""


def _run(module, name, device, backend):
    """None, or how the test fails, and why."""

    def common(self, model, inputs, kwargs=None, copy_to_gpu=True, check_lowp=False, **options):
        if hasattr(model, "to"):
            model = model.to(device)
        if copy_to_gpu:
            inputs = tuple(module.clone_preserve_strides_offset(x, device=device) for x in inputs)
        module.check_model(self, model, inputs, kwargs, **options)

    def compile(model=None, *, backend=None, mode=None, options=None, **more):
        if model is None:
            return lambda model: compile(model, backend=backend, **more)
        return original(model, backend=module.compile_fx if backend in (None, "inductor") else backend, **more)

    case = type("Case", (module.CommonTemplate, module.TestCase), {"common": common, "device": device})(name)
    result, original = unittest.TestResult(), torch.compile
    module.compile_fx, torch.compile = backend, compile
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case.run(result)
    finally:
        torch.compile = original
    if result.skipped:
        return "skipped", result.skipped[0][1].splitlines()[0]
    found = [*result.errors, *result.failures]
    return ("failed", _reason(found[0][1])) if found else None


def _reason(text):
    """The line of a traceback that names the error, and the one after it."""
    lines = [line for line in text.splitlines() if line and not line.startswith((" ", "Traceback"))]
    return " ".join(lines[:2])[:300] if lines else text[-300:]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--only", default="")
    parser.add_argument("--every", type=int, default=1, help="run one test of so many")
    parser.add_argument("--first", type=int, default=0, help="the number of the first one")
    parser.add_argument("--dynamic", action="store_true", help="all sizes are symbols, as in PyTorch's second run")
    arguments = parser.parse_args()
    import metalcore.simulator  # noqa: F401

    torch.set_num_threads(1)
    torch._dynamo.config.assume_static_by_default = not arguments.dynamic
    module = load(arguments.file, "mps")
    chosen = [name for name in tests(module) if arguments.only in name]
    counts, start = Counter(), time.time()
    for name in chosen[arguments.first :: arguments.every]:
        kind, why = outcome(module, name, "mps")
        counts[kind] += 1
        if why:
            print(f"{kind:10} {name}: {why}", flush=True)
    print(f"{time.time() - start:.0f} s:", dict(counts))
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
