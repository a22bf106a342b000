"""One text out of a kernel's source and the headers it includes: Metal compiles a program from memory, where no
`#include "…"` finds a file."""

import re
from pathlib import Path

from .errors import MSLError

_INCLUDE = re.compile(r'\s*#\s*include\s*"([^"]+)"')
_ONCE = re.compile(r"\s*#\s*pragma\s+once\b")


def inline_headers(source, filename, include_dirs):
    """MSL without `#include "…"`.

    A header is put in where it is first included and nowhere else, as `#pragma once` would have it. `#line` keeps the
    compiler's messages in terms of the files.

    Args:
        source: MSL text.
        filename: what messages call it.
        include_dirs: where headers are looked for, in order, after the folder of the file that includes them.

    Raises:
        MSLError: a header is in none of the directories.
    """
    seen = set()

    def lines(text, name, folders):
        yield f'#line 1 "{name}"'
        for number, line in enumerate(text.splitlines(), 1):
            match = _INCLUDE.match(line)
            if not match:
                yield "" if _ONCE.match(line) else line
                continue
            path = next((path for folder in folders if (path := Path(folder) / match[1]).is_file()), None)
            if path is None:
                raise MSLError(f'{name}:{number}: error: "{match[1]}" file not found')
            if path.resolve() not in seen:
                seen.add(path.resolve())
                yield from lines(path.read_text(encoding="utf-8"), match[1], [path.parent, *include_dirs])
            yield f'#line {number + 1} "{name}"'

    return "\n".join(lines(source, filename, list(include_dirs))) + "\n"
