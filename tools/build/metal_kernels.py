"""The built-in kernels for Metal: each family's source in one piece, and its .metallib where Apple's compiler is.

A family has up to a hundred kernels, most of them instantiations that macros make, and a program needs a few of them.
Metal compiles all that are in its source. So each instantiation gets a line of its own,

    /* kernel softmax_simd4_half */ template [[host_name("softmax_simd4_half")]] [[kernel]] …;

and csrc/backends/mps/pipelines.mm drops lines that nobody asked for, without understanding MSL.
"""

import re
import shutil
import subprocess
from pathlib import Path

from .families import families, with_includes
from .front_end import inline_headers, preprocess, translator_files
from .places import KERNELS, MACOS_VERSION
from .tasks import run

_DEFINE = re.compile(r"^([ \t]*#[ \t]*define[ \t]+\w+(?:\([^)\n]*\))?)((?:[^\n\\]|\\(?:.|\n))*)$", re.MULTILINE)
_DIRECT = re.compile(r"^[ \t]*template\s*\[\[[^;{}\\]*;", re.MULTILINE)
METAL = ["xcrun", "-sdk", "macosx", "metal"]
# What csrc/backends/mps/compile_options.mm says of sources: a compiler since Xcode 16 has words for it, and an older
# one the switch that they replace.
_MATH = ["-fmetal-math-mode=safe", "-fmetal-math-fp32-functions=precise"]
_OLD_MATH = ["-fno-fast-math"]


def flags():
    """Returns the options of Apple's compiler."""
    flags = ["-std=metal3.1", "-O2", f"-mmacosx-version-min={MACOS_VERSION}"]
    known = subprocess.run([*METAL, *flags, *_MATH, "-fsyntax-only", "-x", "metal", "/dev/null"], capture_output=True)
    return [*flags, *(_OLD_MATH if known.returncode else _MATH)]


def for_language(options, text):
    """Returns the options for a program, which is of MSL 3.1, or of 4.0 where it has tensors: macOS 26 runs that."""
    if "#include <metal_tensor>" not in text:
        return options
    newer = {"-std=metal3.1": "-std=metal4.0", f"-mmacosx-version-min={MACOS_VERSION}": "-mmacosx-version-min=26.0"}
    return [newer.get(option, option) for option in options]


def metal_kernels(tasks, folder=KERNELS):
    """Returns lib/metal/<family>.metal and, on a Mac with Xcode, lib/metal/<family>.metallib. A family that Apple's
    compiler rejects is left to its source, which is compiled kernel by kernel on first use."""
    has_metal = shutil.which("xcrun") and not subprocess.run([*METAL, "--version"], capture_output=True).returncode
    options = flags() if has_metal else []
    outputs = []
    for family, source in families(folder).items():
        inputs = with_includes(source, folder)
        outputs.append(
            tasks.add(
                f"lib/metal/{family}.metal",
                [*inputs, *translator_files(), Path(__file__)],
                [],
                lambda output, source=source: output.write_text(_program(source, folder)),
            )
        )
        if has_metal:
            language = for_language(options, source.read_text(encoding="utf-8"))
            command = [*METAL, *language, f"-I{folder}", str(source), "-o"]
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


def separate(text, name):
    """Returns MSL in one piece, with a line for each instantiation at its end.

    Raises:
        RuntimeError: a macro makes an instantiation and something else, so that they cannot be told apart.
    """
    before, instantiations = _parted(text, name)
    if not instantiations:
        return text
    rest = _DIRECT.sub(_blank, _DEFINE.sub(_emptied, text))
    after, left = _parted(rest, name)
    if left or before != after:
        raise RuntimeError(f"{name}: a macro that instantiates a kernel (host_name) must do nothing else")
    lines = [f"/* kernel {kernel} */ {statement}\n" for kernel, statement in instantiations]
    return rest + '#line 1 "instantiations"\n' + "".join(lines)


def _emptied(define):
    """Returns a definition without its body, if that instantiates kernels. Lines keep their numbers."""
    return define[1] + _blank(define[2]) if "host_name" in define[2] else define[0]


def _blank(text):
    return "\n" * (text if isinstance(text, str) else text[0]).count("\n")


def _parted(text, name):
    """Returns (the words of a program that are in no instantiation, [(a kernel's name, the instantiation)])."""
    tokens, *_ = preprocess(text, filename=name)
    words, found, i = [], [], 0
    while i < len(tokens):
        if tokens[i].text == "template" and i + 1 < len(tokens) and tokens[i + 1].text == "[":
            end = next(j for j in range(i, len(tokens)) if tokens[j].text == ";") + 1
            found.append(_instantiation(tokens[i:end]))
            i = end
        else:
            words.append(tokens[i].text)
            i += 1
    return words, found


def _instantiation(tokens):
    words = []
    for token in tokens:
        if token.kind == "str" and words and words[-1].endswith('"'):
            words[-1] = words[-1][:-1] + token.text[1:]  # adjacent literals are one
        else:
            words.append(token.text)
    kernel = words[words.index("host_name") + 2].strip('"')
    return kernel, re.sub(r" (?=[,;()\]])|(?<=[(\[]) ", "", " ".join(words))
