"""A Sphinx extension for docstrings that are plain text: `names` in backticks, sections as Google's, code indented."""

import re

_NAMES = re.compile(r"(``.+?``|`[^`]+`)")
_MARKUP = re.compile(r"[*|]|(?<=\w)_(?=\W|$)")
_SECTION = re.compile(r"(Args|Attributes|Returns|Raises|Yields):$")


def setup(app):
    # Napoleon, which reads the sections, has priority 500.
    app.connect("autodoc-process-docstring", _rewrite, priority=400)
    return {"parallel_read_safe": True}


def _rewrite(app, what, name, obj, options, lines):
    lines[:] = list(restructured_text(lines))


def restructured_text(lines):
    """Escapes the lines' markup, and gives names, code, explained terms and the example at the end Sphinx's forms."""
    paragraph = []
    inside = None  # what indented lines belong to: a section, a list's item, an explained term, code, or the example
    for line in lines:
        if inside == "example":
            yield line
        elif line == "Example:":
            yield from paragraph
            paragraph, inside = [], "example"
            yield from (line, "")
        elif line.startswith(" "):
            if paragraph:
                yield " ".join(paragraph)
                paragraph, inside = [], "term"
            elif inside is None:
                yield from ("::", "")
                inside = "code"
            yield line if inside == "code" else _escaped(line)
        elif not line or _SECTION.match(line) or line.startswith("- "):
            yield from paragraph
            paragraph = []
            inside = inside if not line else "section or item"
            yield _escaped(line)
        else:
            inside = None
            paragraph.append(_escaped(line))
    yield from paragraph


def _escaped(line):
    parts = _NAMES.split(line)
    for index, part in enumerate(parts):
        parts[index] = f"``{part.strip('`')}``" if index % 2 else _MARKUP.sub(r"\\\g<0>", part)
    return "".join(parts)
