"""Metal sources from which a program can leave out instantiations of templates.

A family has up to a hundred kernels, most of them instantiations that macros make, and a program needs a few of them.
Metal compiles all that are in its source. So each one gets a line of its own,

    /* kernel softmax_simd4_half */ template [[host_name("softmax_simd4_half")]] [[kernel]] …;

and csrc/backends/mps/pipelines.mm drops lines that nobody asked for, without understanding MSL.
"""

import re

from .front_end import preprocess

_DEFINE = re.compile(r"^([ \t]*#[ \t]*define[ \t]+\w+(?:\([^)\n]*\))?)((?:[^\n\\]|\\(?:.|\n))*)$", re.MULTILINE)
_DIRECT = re.compile(r"^[ \t]*template\s*\[\[[^;{}\\]*;", re.MULTILINE)


def separate(text, name):
    """MSL in one piece, with a line for each instantiation at its end.

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
    """A definition without its body, if that instantiates kernels. Lines keep their numbers."""
    return define[1] + _blank(define[2]) if "host_name" in define[2] else define[0]


def _blank(text):
    return "\n" * (text if isinstance(text, str) else text[0]).count("\n")


def _parted(text, name):
    """(the words of a program that are in no instantiation, [(a kernel's name, the instantiation)])."""
    tokens, _ = preprocess(text, filename=name)
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
