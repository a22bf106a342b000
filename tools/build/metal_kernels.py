"""The built-in kernels for Metal: each family's source in one piece, and its .metallib where Apple's compiler is."""

import shutil
import subprocess
from pathlib import Path

from .families import families, with_includes
from .front_end import inline_headers, translator
from .instantiations import separate
from .places import KERNELS, MACOS_VERSION
from .tasks import run

METAL = ["xcrun", "-sdk", "macosx", "metal"]
FLAGS = ["-std=metal3.1", "-fno-fast-math", "-O2", f"-mmacosx-version-min={MACOS_VERSION}"]


def metal_kernels(tasks, folder=KERNELS):
    """lib/metal/<family>.metal and, on a Mac with Xcode, lib/metal/<family>.metallib. A family that Apple's compiler
    rejects is left to its source, which is compiled kernel by kernel on first use."""
    has_metal = shutil.which("xcrun") and not subprocess.run([*METAL, "--version"], capture_output=True).returncode
    outputs = []
    for family, source in families(folder).items():
        inputs = with_includes(source, folder)
        outputs.append(
            tasks.add(
                f"lib/metal/{family}.metal",
                [*inputs, *translator(), Path(__file__).with_name("instantiations.py")],
                [],
                lambda output, source=source: output.write_text(_program(source, folder)),
            )
        )
        if has_metal:
            command = [*METAL, *FLAGS, f"-I{folder}", str(source), "-o"]
            outputs.append(
                tasks.add(
                    f"lib/metal/{family}.metallib",
                    inputs,
                    command,
                    lambda output, command=command: run([*command, str(output)]),
                    optional="its source is compiled on first use",
                )
            )
    return outputs


def _program(source, folder):
    text = inline_headers(source.read_text(encoding="utf-8"), source.name, [source.parent, folder])
    return separate(text, source.name)
