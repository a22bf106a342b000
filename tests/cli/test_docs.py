"""Every Python block and every `python -m metalcore` line of README and docs/ runs, as do the examples.

A block or command runs on the device that it names: "cuda", "mps" or the simulator. One that names none runs on all.
Blocks share the tests' process, so that none has to start its own. `make docs` checks the links.
"""

import doctest
import importlib
import inspect
import os
import re
import shlex
import subprocess
import zlib
from pathlib import Path

import pytest
import torch
from processes import python

import metalcore
from metalcore import nn, optim, overrides, paged, quant
from metalcore.cli import main
from metalcore.integrations import transformers

ROOT = Path(__file__).resolve().parents[2]
# Commands that only read: they share the tests' process, as blocks do. tests/cli/test_cli.py starts one.
HERE = {"cflags", "check", "estimate", "explain", "info", "op", "ops"}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def where(text):
    if re.search(r"""["']cuda|--device cuda""", text):
        return pytest.mark.only_on("cuda")
    if "simulator" in text:
        return pytest.mark.only_on("simulator")
    return pytest.mark.only_on("simulator", "mps") if "mps" in text else ()


def blocks(language):
    for page in PAGES:
        found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S)
        for number, text in enumerate((text for name, text in found if name == language), 1):
            yield pytest.param(text, id=f"{page.stem}-{number}", marks=where(text))


def commands():
    lines = {
        line for block in blocks("") for line in block.values[0].splitlines() if line.startswith("python -m metalcore")
    }
    # Benchmarks, golden artifacts and the selftest have tests of their own.
    chosen = sorted(line for line in lines if "--list" in line or not re.search(r" (bench|golden|selftest)\b", line))
    return [pytest.param(line, marks=where(line)) for line in chosen]


def run(*command, cwd, **variables):
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    found = python(*command, cwd=cwd, env={**os.environ, "PYTHONPATH": paths, **variables})
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_paths_in_comments_and_pages_exist():
    """A path of ours begins with a folder of the checkout or of kernels/, and may leave out the folders before it."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    known = {name[start:] for name in files for start in (0, *(found.end() for found in re.finditer("/", name)))}
    folders = {name.removeprefix("kernels/").split("/")[0] for name in files if "/" in name}
    path = re.compile(r"(?<![\w./<>{*-])(?:[\w-]+/)+[\w.-]+\.(?:cpp|h|mm|metal|py|md|sh)\b")
    wrong = [
        f"{name}: {mention}"
        for name in files
        if name.startswith(("csrc/", "docs/", "kernels/", "metalcore/"))
        and re.search(r"\.(cpp|h|mm|metal|py|md)$", name)
        for mention in path.findall((ROOT / name).read_text())
        if mention.split("/")[0] in folders and mention not in known
    ]
    assert not wrong


def execute(code):
    exec(compile(code, "block", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("code", [*blocks("python")])
def test_python_block(code):
    execute(code)


@pytest.mark.parametrize("command", commands())
def test_command(command, tmp_path, monkeypatch, capsys):
    for name in ("script.py", "module.py"):
        (tmp_path / name).write_text("import torch\nprint(torch.ones(2, device='mps').sum().item())\n")
    (tmp_path / "kernel.metal").write_text("kernel void one(device float* x [[buffer(0)]]) { x[0] = 1.0f; }\n")
    _, _, module, *arguments = shlex.split(command, comments=True)
    if module == "metalcore" and arguments[0] in HERE:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("METALCORE_CACHE_DIR", str(tmp_path / "cache"))
        assert main(arguments) == 0
        said = capsys.readouterr().out
    else:
        said = run("-m", module, *arguments, cwd=tmp_path, METALCORE_CACHE_DIR=str(tmp_path / "cache"))
    assert said.strip() or " check " in command  # `check` prints nothing about a right program


@pytest.mark.only_on("simulator")
def test_checking_mode_in_the_docs_finds_the_fault(capsys):
    said = []
    for code in (block.values[0] for block in blocks("python") if "KernelError as error" in block.values[0]):
        execute(code)
        said.append(" ".join(capsys.readouterr().out.split()))
    assert "out-of-bounds read in shift line 3" in said and len(said) == 2
    page = " ".join((ROOT / "docs" / "kernels.md").read_text().split())
    [linear] = [one for one in said if "shift" not in one]
    page, linear = (re.sub(r"thread \(\d+", "thread (n", text) for text in (page, linear))  # which one, varies
    assert linear in page


@pytest.mark.only_on("simulator", "mps")
@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_example(example, tmp_path):
    """What one compiles others find in the cache: kernels where the build has none, and those of programs."""
    assert run(example, cwd=tmp_path).strip()


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


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.only_on("simulator")
def test_the_site_has_no_broken_links_and_every_public_name(tmp_path):
    done = subprocess.run([ROOT / "tools" / "docs.sh", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "index.html").exists() and (tmp_path / "docs" / "linalg.html").exists()
    inventory = zlib.decompress((tmp_path / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    documented = {line.split()[0] for line in inventory.splitlines() if " py:" in line}
    from metalcore import simulator  # where tests are for another device, it would not be imported

    public = {
        f"{module.__name__}.{name}"
        for module in (
            metalcore,
            metalcore.linalg,
            nn,
            optim,
            overrides,
            paged,
            quant,
            transformers,
            simulator,
        )
        for name in module.__all__
        if not inspect.ismodule(getattr(module, name))
    }
    # The reference documents linear algebra as functions of metalcore.linalg.
    missing = public - documented - {f"metalcore.{name}" for name in metalcore.linalg.__all__}
    assert not missing and "metalcore.linalg.qr" in documented
