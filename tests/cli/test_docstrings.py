"""Exported functions and classes have docstrings of one form, and examples that run.

CONTRIBUTING.md has the form: a function's docstring begins with a verb, and ends with an example.
"""

import doctest
import importlib
import inspect
import re

import pytest
import torch

import metalcore

# What users import: the package, its public packages, and modules that pages name.
MODULES = [
    "metalcore",
    *(f"metalcore.{name}" for name in ("distributed", "generation", "gguf", "linalg", "loss", "msl", "nn", "optim")),
    *(f"metalcore.{name}" for name in ("overrides", "paged", "programs", "quant", "replay", "sampling", "simulator")),
    *(f"metalcore.integrations.{name}" for name in ("flash_attn", "peft", "transformers")),
    "metalcore.estimates",
    "metalcore.mac_kernels",
    "metalcore.msl.check",
    "metalcore.nn.attention",
    "metalcore.recording",
]
_VERB = re.compile(r"[A-Z][a-z]+s\b(?! (?:of|and)\b)(?!,)")


def exports():
    """Yields each exported function and class once, with its name."""
    seen = set()
    for module in map(importlib.import_module, MODULES):
        for name in getattr(module, "__all__", ()):
            exported = getattr(module, name)
            if (inspect.isclass(exported) or inspect.isroutine(exported)) and exported not in seen:
                seen.add(exported)
                yield f"{module.__name__}.{name}", exported


def test_docstrings_of_exported_functions_begin_with_a_verb():
    functions = {name: export.__doc__ or "" for name, export in exports() if not inspect.isclass(export)}
    assert not {name: text.split("\n")[0] for name, text in functions.items() if not _VERB.match(text)}


def test_exports_have_examples():
    assert not [name for name, export in exports() if ">>> " not in (export.__doc__ or "")]


@pytest.mark.only_on("simulator")
def test_examples_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # some write files
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner(verbose=False)
    for name, export in exports():
        for example in finder.find(export, name, globs={"torch": torch, "metalcore": metalcore}):
            runner.run(example, clear_globs=False)  # dynamo keeps weak references into them
    assert not runner.failures, capsys.readouterr().out
    assert runner.tries > len(list(exports()))
