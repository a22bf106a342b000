"""The built-in kernels for Metal: each family's source in one piece, and its .metallib where Apple's compiler is."""

import shutil
import subprocess
from pathlib import Path

from .families import families, with_includes
from .front_end import inline_headers, translator_files
from .instantiations import separate
from .places import KERNELS, MACOS_VERSION
from .tasks import run

METAL = ["xcrun", "-sdk", "macosx", "metal"]
# What csrc/backends/mps/compile_options.mm says of sources: a compiler since Xcode 16 has words for it, and an older
# one the switch that they replace.
_MATH = ["-fmetal-math-mode=safe", "-fmetal-math-fp32-functions=precise"]
_OLD_MATH = ["-fno-fast-math"]


def flags():
    """The options of Apple's compiler."""
    flags = ["-std=metal3.1", "-O2", f"-mmacosx-version-min={MACOS_VERSION}"]
    known = subprocess.run([*METAL, *flags, *_MATH, "-fsyntax-only", "-x", "metal", "/dev/null"], capture_output=True)
    return [*flags, *(_OLD_MATH if known.returncode else _MATH)]


def metal_kernels(tasks, folder=KERNELS):
    """lib/metal/<family>.metal and, on a Mac with Xcode, lib/metal/<family>.metallib. A family that Apple's compiler
    rejects is left to its source, which is compiled kernel by kernel on first use."""
    has_metal = shutil.which("xcrun") and not subprocess.run([*METAL, "--version"], capture_output=True).returncode
    options = flags() if has_metal else []
    outputs = []
    for family, source in families(folder).items():
        inputs = with_includes(source, folder)
        outputs.append(
            tasks.add(
                f"lib/metal/{family}.metal",
                [*inputs, *translator_files(), Path(__file__).with_name("instantiations.py")],
                [],
                lambda output, source=source: output.write_text(_program(source, folder)),
            )
        )
        if has_metal:
            command = [*METAL, *options, f"-I{folder}", str(source), "-o"]
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
