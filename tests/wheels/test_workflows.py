"""Continuous integration and the forms for issues name files, targets of make and commands that are there."""

import os
import re
import shlex
from pathlib import Path

import pytest
import yaml

from metalcore.cli import main

ROOT = Path(__file__).resolve().parents[2]
GITHUB = ROOT / ".github"
pytestmark = pytest.mark.skipif(
    not GITHUB.exists() and not os.environ.get("CI"), reason="a source distribution has no workflows"
)
# The other files whose commands only continuous integration and releases run.
OTHERS = ("pyproject.toml", "build_all_wheels.sh", ".ci/run")
# Folders that a job makes.
MADE = ("dist", "sdist", "wheel", "build", "isolated")


def jobs():
    for path in sorted((GITHUB / "workflows").glob("*.yml")):
        for name, job in yaml.safe_load(path.read_text())["jobs"].items():
            yield f"{path.stem}, {name}", job


def scripts():
    for name, job in jobs():
        for step in job["steps"]:
            if "run" in step:
                yield name, step["run"]
    for name in OTHERS:
        yield name, (ROOT / name).read_text() if (ROOT / name).exists() else ""


def forms():
    return sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml"))


def metalcore_commands():
    found = set()
    for text in [*(text for _, text in scripts()), *(path.read_text() for path in forms())]:
        found |= set(re.findall(r"-m metalcore ([a-z][^\n\"'`)]*)", text))
    return sorted(found)


def test_files_and_folders_are_there():
    missing = []
    for name, text in scripts():
        for word in re.findall(r"(?<![\w./$*{-])\.?[\w-]+/[\w./-]*[\w-]|\.ci/run", text):
            first = word.split("/")[0]
            if first in MADE or not (first.startswith(".") or (ROOT / first).exists()):
                continue
            missing += [f"{name}: {word}"] * (not (ROOT / word).exists())
    assert not missing


def test_modules_and_targets_are_there():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    missing = []
    for name, text in scripts():
        for module in re.findall(r"-m (tools\.\w+)", text):
            path = ROOT / module.replace(".", "/")
            missing += [f"{name}: {module}"] * (not path.with_suffix(".py").exists() and not path.is_dir())
        for target in re.findall(r"^\s*make ([\w-]+)", text, re.M):
            missing += [f"{name}: make {target}"] * (target not in targets)
    assert not missing


def test_hashed_files_are_there():
    names = re.findall(r"'([\w./-]+\.\w+)'", " ".join(re.findall(r"hashFiles\((.*?)\)", _text())))
    names += re.findall(r"cache-dependency-path: (\S+)", _text())
    assert names and [name for name in names if not (ROOT / name).exists()] == []


def test_jobs_that_others_need_are_there():
    for path in (GITHUB / "workflows").glob("*.yml"):
        found = yaml.safe_load(path.read_text())["jobs"]
        for name, job in found.items():
            needed = job.get("needs", [])
            assert {*([needed] if isinstance(needed, str) else needed)} <= found.keys(), name
            assert job["timeout-minutes"] if "environment" not in job else True, name


def _text():
    return "\n".join(path.read_text() for path in (GITHUB / "workflows").glob("*.yml"))


def test_the_form_for_macs_asks_for_the_reports():
    (path,) = forms()
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= form.keys()
    fields = {part["id"]: part for part in form["body"] if part["type"] != "markdown"}
    assert len(fields) == len([part for part in form["body"] if part["type"] != "markdown"])
    assert all(part["type"] in ("textarea", "dropdown") and part["attributes"]["label"] for part in fields.values())
    for name in ("selftest", "info"):
        assert fields[name]["validations"]["required"]
        assert f"`python -m metalcore {name}`" in fields[name]["attributes"]["description"]


@pytest.mark.parametrize("command", metalcore_commands())
def test_commands_are_understood(command):
    with pytest.raises(SystemExit) as end:
        main([*shlex.split(command), "--help"])  # other arguments are read first
    assert end.value.code == 0
