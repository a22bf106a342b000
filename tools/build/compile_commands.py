"""compile_commands.json: how each file of csrc is compiled, for editors and for tools that compile it again."""

import json
import shlex
import subprocess
from pathlib import Path

from .places import CSRC, WORK

NAME = "compile_commands.json"


def write(folder, word, command):
    """Writes the commands of a folder's build.ninja, where one word stands for the compiler's command."""
    done = subprocess.run(
        ["ninja", "-C", folder, "-t", "compdb", "compile"], check=True, capture_output=True, text=True
    )
    entries = json.loads(done.stdout[done.stdout.index("[") :])  # after what ninja may say of the folder
    for entry in entries:
        entry["command"] = entry["command"].replace(word, shlex.join(command), 1)
    (WORK / NAME).write_text(json.dumps(entries, indent=2))


def read(work):
    """{source below csrc without its suffix, as "gpu/record": (source, the compiler's command with its flags)}.

    Args:
        work: places.WORK of the build.
    """
    commands = {}
    for entry in json.loads((work / NAME).read_text()):
        source, parts = Path(entry["file"]), shlex.split(entry["command"])
        for option in ("-MF", "-o"):
            at = parts.index(option)
            del parts[at : at + 2]
        command = [part for part in parts if part not in ("-MMD", "-c", entry["file"])]
        commands[source.relative_to(CSRC).with_suffix("").as_posix()] = source, command
    return commands
