"""Git has one picture and one HTML page of a family at most, and pages show exactly the pictures that it has."""

import os
import re
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.harness.run import families

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
pytestmark = pytest.mark.skipif(
    not RESULTS.exists() and not os.environ.get("CI"), reason="a source distribution, which has no results"
)


def family(path):
    """The family that a picture shows, or that a page is about; "" for a page about several."""
    return next((name for name in sorted(families(), key=len, reverse=True) if path.stem.endswith(f"-{name}")), "")


@pytest.mark.parametrize("kind", ["png", "html"])
def test_one_of_each_kind_is_kept(kind):
    kept = Counter(map(family, RESULTS.glob(f"*.{kind}")))
    assert kept["linalg_map"] and max(kept.values()) == 1, kept


def test_pages_show_all_pictures_that_are_kept_and_no_others():
    shown = [name for page in RESULTS.glob("*.md") for name in re.findall(r"!\[.*?\]\((.*?)\)", page.read_text())]
    assert sorted(shown) == sorted(path.name for path in RESULTS.glob("*.png"))
