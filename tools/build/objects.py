"""C++ sources, each compiled by itself, after the headers that most of them include."""

import functools
import json
import os
import re
import shutil
from pathlib import Path

from .places import CSRC, ROOT, WORK
from .tasks import run

_HEADER = CSRC / "precompiled.h"


def precompile_headers(tasks, extension, command):
    """Has csrc/precompiled.h compiled with the extension's flags. Returns the header that the sources begin with, or
    None with ccache, which would keep no result."""
    if "ccache" in os.path.realpath(shutil.which(command[0]) or command[0]):
        return None
    header = tasks.out / extension.objects / _HEADER.name
    return precompile(tasks, header, [*command, *extension.extra_compile_args])


def precompile(tasks, header, compile_command):
    """Makes a header that stands for csrc/precompiled.h. Where the option -include names HEADER and the other flags are
    the same, compilers read HEADER.gch in its place."""

    def action(output):
        header.write_text(f'#include "{_HEADER}"\n')
        # Clang refuses a system's header that is newer, so that these are inputs too: -MD and not -MMD.
        _compile([*compile_command, "-MD", "-c", "-x", "c++-header", str(header)], output)

    name = f"{header.relative_to(tasks.out)}.gch"
    tasks.add(name, _read_by_compiler(tasks.out / name), compile_command, action)
    return header


def add_objects(tasks, extensions, command, headers):
    """Has each source of the extensions compiled, and what several of them have without PyTorch's headers only for the
    last of them. Returns the paths of each one's objects.

    Args:
        headers: what precompile_headers() returned for each extension.
    """
    shared, outputs = {}, []
    for extension, header in reversed([*zip(extensions, headers)]):
        objects = {
            source: shared.get(source) or _object(tasks, extension, source, command, header)
            for source in sorted(extension.sources)
        }
        shared |= {source: output for source, output in objects.items() if _needs_no_library(ROOT / source)}
        outputs.insert(0, [*objects.values()])
    return outputs


_LIBRARY_HEADER = re.compile(r'#\s*(?:include|import)\s*[<"](?:torch|ATen|c10|Python)\b')
_OWN_HEADER = re.compile(r'#\s*(?:include|import)\s*"(.+)"')


@functools.cache
def _needs_no_library(path):
    """Returns whether neither a file nor what it includes by a path from itself includes a header of PyTorch's or
    Python's: libmetalcore has others in their place."""
    text = path.read_text()
    included = [path.parent / name for name in _OWN_HEADER.findall(text)]
    return not _LIBRARY_HEADER.search(text) and all(
        _needs_no_library(Path(os.path.normpath(header))) for header in included if header.exists()
    )


def _object(tasks, extension, source, command, header):
    name = f"{extension.objects}/{Path(source).with_suffix('.o')}"
    inputs = [ROOT / source, *_read_by_compiler(tasks.out / name)]
    compile_command = [*command, *extension.extra_compile_args]
    if header and source.endswith(".cpp"):  # Objective-C++ is another language
        inputs.append(header.with_name(f"{header.name}.gch"))
        compile_command += ["-include", str(header)]
    compile_command += ["-MMD", "-c", str(ROOT / source)]
    return tasks.add(name, inputs, compile_command, lambda output: _compile(compile_command, output))


def _compile(command, output):
    run([*command, "-MF", f"{output}.d", "-o", str(output)])


def _read_by_compiler(output):
    """Returns the files that the output was compiled from. The compiler wrote a rule for make, which counts as missing
    itself where there is none."""
    rule = output.with_name(f"{output.name}.d")
    if not rule.exists():
        return [rule]
    names = re.split(r"(?<!\\)\s+", rule.read_text().split(": ", 1)[1].replace("\\\n", " ").strip())
    return [Path(name.replace("\\ ", " ").replace("$$", "$")) for name in names]


COMPILE_COMMANDS = "compile_commands.json"


def write_compile_commands(extension, command):
    """Writes how the compiler's command compiles an extension's sources, by themselves."""
    entries = [
        {
            "directory": str(ROOT),
            "file": str(ROOT / source),
            "arguments": [*command, *extension.extra_compile_args, "-c", str(ROOT / source)],
        }
        for source in extension.sources
    ]
    (WORK / COMPILE_COMMANDS).write_text(json.dumps(entries, indent=2))


def read_compile_commands(work):
    """Returns {source below csrc without its suffix, as "gpu/recorder": (source, the compiler's command with its
    flags)}.

    Args:
        work: places.WORK of the build.
    """
    commands = {}
    for entry in json.loads((work / COMPILE_COMMANDS).read_text()):
        source = Path(entry["file"])
        commands[source.relative_to(CSRC).with_suffix("").as_posix()] = source, entry["arguments"][:-2]
    return commands
