"""tools/setup_venv.sh installs what pyproject.toml's extras require, and constraints.txt pins it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]\n")[2].partition("\n\n")[0]
REQUIREMENTS = re.findall(r'"([\w-]+)[^"]*"[,\]]', EXTRAS)


@pytest.mark.parametrize("requirement", REQUIREMENTS)
def test_what_an_extra_asks_for(requirement):
    script = (ROOT / "tools" / "setup_venv.sh").read_text()
    packages = " ".join(re.findall(r'\[\w+\]\+?="([^"]*)"', script))
    assert requirement in re.findall(r"[\w-]+", packages)
    assert re.search(rf"^{requirement}==", (ROOT / "constraints.txt").read_text(), re.M | re.I)


def test_the_extras_are_found():
    assert {"matplotlib", "pytest", "ruff", "pyright", "sphinx", "nvidia-cuda-nvrtc"} <= set(REQUIREMENTS)
