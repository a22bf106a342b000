"""Every Python block and every `python -m metalcore` line of README and docs/ runs, as do the examples.

A block or command runs on the device that it names: "cuda", "mps" or the simulator. One that names none runs on all.
Blocks share the tests' process, so that none has to start its own. tests/cli/test_site.py checks the links.
"""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from processes import python

from metalcore.cli import main

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
