"""One text from a kernel's source and the headers that it includes: Metal compiles a program from memory, where
`#include "…"` finds no file."""

import re
from pathlib import Path

from ..errors import MSLError
from .numbers import MAX_INCLUDE_DEPTH

_INCLUDE = re.compile(r'\s*#\s*include\s*"([^"]+)"')
_ONCE = re.compile(r"\s*#\s*pragma\s+once\b")
_DIRECTIVE = re.compile(r"\s*#\s*(\w+)\s*(\w*)")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def inline_headers(source, filename, include_dirs):
    """Returns MSL without `#include "…"`.

    A header with `#pragma once` or a guard is put in where it is first included, and again only if that was inside an
    `#if`. Any other header is put in wherever it is included. `#line` makes the compiler's messages name the files.

    Args:
        source: MSL text.
        filename: its name in messages.
        include_dirs: directories in which headers are looked for, in order, after the folder of the file that includes
            them.

    Raises:
        MSLError: a header is in none of the directories, or headers without a guard include themselves.
    """
    return "\n".join(_Inlining(include_dirs).lines(source, filename, list(include_dirs), 0, ())) + "\n"


class _Inlining:
    def __init__(self, include_dirs):
        self.include_dirs = include_dirs
        self.done = set()  # headers that need not be put in again
        self.guards = {}  # header -> the macro that replaces its `#pragma once`

    def lines(self, text, name, folders, depth, within):
        """Yields the lines of a file.

        Args:
            depth: how many `#if` it is inside of.
            within: the files through which it is included.
        """
        yield f'#line 1 "{name}"'
        for number, line in enumerate(text.splitlines(), 1):
            directive = _DIRECTIVE.match(line)
            word = directive[1] if directive else ""
            depth += (word in ("if", "ifdef", "ifndef")) - (word == "endif")
            match = _INCLUDE.match(line)
            if not match:
                yield "" if _ONCE.match(line) else line
                continue
            path = next((path for folder in folders if (path := Path(folder) / match[1]).is_file()), None)
            if path is None:
                raise MSLError(f'{name}:{number}: error: "{match[1]}" file not found')
            yield from self.header(path.resolve(), match[1], f"{name}:{number}", depth, within)
            yield f'#line {number + 1} "{name}"'

    def header(self, path, name, place, depth, within):
        if path in self.done:
            return
        text = path.read_text(encoding="utf-8")
        once, guarded = any(map(_ONCE.match, text.splitlines())), _is_guarded(text)
        if once or guarded:
            if path in within:
                return  # the guard leaves nothing of it
            if depth == 0:
                self.done.add(path)
        elif path in within or len(within) >= MAX_INCLUDE_DEPTH:
            raise MSLError(f"{place}: error: #include nested too deeply")
        inner = self.lines(text, name, [path.parent, *self.include_dirs], depth - guarded, (*within, path))
        if not once:
            yield from inner
            return
        guard = self.guards.setdefault(path, f"METALCORE_ONCE_{len(self.guards)}")
        yield f"#ifndef {guard}"
        yield f"#define {guard}"
        yield from inner
        yield "#endif"


def _is_guarded(text):
    """Returns whether the first two directives of a file are an include guard."""
    lines = [line for line in _COMMENT.sub("", text).splitlines() if line.strip()][:2]
    words = [match.groups() if (match := _DIRECTIVE.match(line)) else ("", "") for line in lines]
    return len(words) == 2 and [word for word, _ in words] == ["ifndef", "define"] and words[0][1] == words[1][1]
