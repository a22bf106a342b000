"""compile_commands.json: how each file of csrc is compiled, for editors and for tools that compile it again."""

import json
from pathlib import Path

from .places import CSRC, ROOT, WORK

NAME = "compile_commands.json"


def write(extension, command):
    """Writes how the compiler's command compiles an extension's sources, by themselves."""
    entries = [
        {
            "directory": str(ROOT),
            "file": str(ROOT / source),
            "arguments": [*command, *extension.extra_compile_args, "-c", str(ROOT / source)],
        }
        for source in extension.sources
    ]
    (WORK / NAME).write_text(json.dumps(entries, indent=2))


def read(work):
    """{source below csrc without its suffix, as "gpu/recorder": (source, the compiler's command with its flags)}.

    Args:
        work: places.WORK of the build.
    """
    commands = {}
    for entry in json.loads((work / NAME).read_text()):
        source = Path(entry["file"])
        commands[source.relative_to(CSRC).with_suffix("").as_posix()] = source, entry["arguments"][:-2]
    return commands
