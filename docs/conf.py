"""The documentation site: the repository's Markdown pages, and the API reference made from the docstrings.

`make docs` builds it. Sphinx's source folder is the repository, so a link between pages is the same here and there.
"""

import gc
import sys
from pathlib import Path

import metalcore
import metalcore.simulator

sys.path.insert(0, str(Path(__file__).parent))  # the extension docstrings
gc.disable()  # a third of the build's time went into walks over pages and PyTorch's objects, which stay until the end

project = "metalcore"
version = release = metalcore.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "docstrings"]
include_patterns = ["*.md", "docs/*.md", "docs/reference/*.rst", "benchmarks/**.md"]
root_doc = "README"

# A missing reference is a warning, and tools/docs.sh makes an error of each warning. The site has no objects of others.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!metalcore\.).*"), ("py:.*", r".*\._.*")]
myst_heading_anchors = 4

autodoc_default_options = {"members": True, "imported-members": True, "show-inheritance": True}
autodoc_member_order = "alphabetical"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = "metalcore"
html_extra_path = ["site"]

NAVIGATION = {
    "README": {
        "Guides": [
            "docs/install",
            "docs/api",
            "docs/transformers",
            "docs/quantization",
            "docs/golden",
            "docs/c",
            "docs/ops",
            "docs/attention",
            "docs/linalg",
            "docs/double",
            "docs/optimizers",
            "docs/programs",
            "docs/distributed",
            "docs/performance",
            "docs/tuning",
        ],
        "Devices": ["docs/cuda", "docs/simulator", "docs/macos", "docs/apple", "docs/doctor"],
        "Kernels": ["docs/kernels", "docs/architecture"],
        "Reference": [
            f"docs/reference/{page}"
            for page in ("functions", "linalg", "modules", "gguf", "switches", "programs", "kernels")
        ],
        "Project": ["CONTRIBUTING", "CHANGELOG", "benchmarks/README"],
    },
    "benchmarks/README": {"Runs": ["results/README"]},
    "benchmarks/results/README": {"Runs": ["2*"]},
}


def complete(app, docname, source):
    """Adds to a page what it has on the site alone."""
    for caption, pages in NAVIGATION.get(docname, {}).items():
        names = "\n".join(pages)
        source[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {caption}\n\n{names}\n```\n"
    if docname == "docs/reference/functions":  # linear algebra has a page of its own
        names = ", ".join(["CrossEntropyOutput", *metalcore.linalg.__all__])
        source[0] = source[0].replace("metalcore\n", f"metalcore\n   :exclude-members: {names}\n", 1)


def setup(app):
    app.connect("source-read", complete)
