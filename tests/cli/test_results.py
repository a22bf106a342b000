"""Git has the pictures that pages show and no others, and no HTML: a run's JSON file gives both again."""

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
pytestmark = pytest.mark.skipif(
    not RESULTS.exists() and not os.environ.get("CI"), reason="a source distribution, which has no results"
)


def pictures(folder):
    """The paths of the pictures that a folder's pages show."""
    return {
        (folder / name).resolve()
        for page in folder.glob("*.md")
        for name in re.findall(r"!\[[^\]]*\]\(([^)]*)\)", page.read_text())
    }


def test_pages_show_all_pictures_that_are_kept_and_no_others():
    kept = {*RESULTS.glob("*.png")}
    assert pictures(RESULTS) == kept
    assert kept <= pictures(ROOT / "docs"), "a picture is large: only what a page explains is worth it"
    assert not [*RESULTS.glob("*.html")]
