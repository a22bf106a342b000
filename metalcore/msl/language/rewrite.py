"""Rewrites of tokens that every C++ target needs (address spaces, literals, swizzles), and what is refused.

A rewrite changes the text of tokens in place (an erased token has empty text) and never moves them, so that indices
into the program and the user's lines stay valid.
"""

import re

from ..errors import error_at
from .declarators import SPACES
from .tokens import matching_angle

_SWIZZLE = re.compile(r"[xyzw]{2,4}|[rgba]{2,4}")
_ASSIGNMENTS = {"=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>=", "++", "--"}
_REFUSED = {
    "double": "'double' is not supported in Metal",
    "visible_function_table": "visible function tables are not supported",
    "intersection_function_table": "intersection function tables are not supported",
    "raytracing": "raytracing is not supported",
    "acceleration_structure": "raytracing is not supported",
    "imageblock": "imageblocks are not supported",
    "command_buffer": "indirect command buffers are not supported",
    "render_command": "indirect command buffers are not supported",
    "compute_command": "indirect command buffers are not supported",
}
_TEXTURE = re.compile(r"(texture|depth)(1d|2d|3d|cube|_buffer)(_ms)?(_array)?|sampler")
_SMALL_FLOAT = re.compile(r"metal_fp\d\w*_format")
_PACKED_FLOATS = re.compile(r"packed_metal_fp\d\w*")


def refuse_unsupported(program):
    """Raises an MSLError at the first thing that metalcore does not support."""
    tokens, declared = program.tokens, {d.name for d in program.walk()}
    for i, token in enumerate(tokens):
        if token.kind != "id" or token.text in declared:
            continue
        if token.text in _REFUSED:
            raise error_at(token, _REFUSED[token.text])
        if _TEXTURE.fullmatch(token.text) and i + 1 < len(tokens):
            following = tokens[i + 1]
            if following.text == "<" or (token.text == "sampler" and following.kind == "id"):
                raise error_at(token, f"textures and samplers ('{token.text}') are not supported")
        packs = token.text == "pack" and any(_SMALL_FLOAT.fullmatch(t.text) for t in tokens[i + 2 : i + 5])
        if packs or _PACKED_FLOATS.fullmatch(token.text):
            raise error_at(
                token,
                f"'{token.text}' of MSL 4.1 is not supported: public sources disagree about the floats of 8 and 4 bits "
                "that numbers beyond the largest one and subnormal numbers become (tensors of these formats are read)",
            )


def erase(tokens, first, last):
    for token in tokens[first:last]:
        token.text = ""


def erase_attributes(program):
    tokens = program.tokens
    for i in range(len(tokens)):
        end = program.attribute_end(i)
        if end is not None:
            erase(tokens, i, end)


def erase_address_spaces(program, claimed):
    """Erases the address spaces; `constant` becomes `const` where the type has none.

    Args:
        claimed: the indices of the address spaces that are understood (see address_spaces.py).

    Raises:
        MSLError: there is an address space that is not understood.
    """
    tokens = program.tokens
    for declaration in program.walk():  # constructors cannot be const
        if declaration.kind == "function" and declaration.in_class and declaration.name == declaration.scope[-1]:
            end = declaration.body[0] if declaration.body else declaration.last
            for i in range(declaration.parameters[1], end):
                if i in claimed:
                    tokens[i].text = ""
    for i, token in enumerate(tokens):
        if (
            token.text == "coherent"
            and tokens[i + 1].text == "("
            and tokens[i + 2].text in ("device", "system", "threadgroup")
        ):
            erase(tokens, i, i + 4)
        elif token.text == "coherent" and tokens[i + 1].text in (*SPACES, "volatile", "const"):
            token.text = ""
        elif token.text in SPACES:
            if i not in claimed:
                raise error_at(token, f"it is not understood what '{token.text}' belongs to")
            token.text = "const" if token.text == "constant" and not _already_const(program, i) else ""


_SPECIFIER_STOPS = {"(", ")", "{", "}", ";", ",", "=", "*", "&", "&&", "[", "]", ":"}


def _already_const(program, i):
    tokens, j = program.tokens, i - 1
    while j >= 0 and tokens[j].text not in _SPECIFIER_STOPS and tokens[j].text not in ("<", ">"):
        if tokens[j].text == "const":
            return True
        j -= 1
    j = i + 1
    while j < len(tokens) and tokens[j].text not in _SPECIFIER_STOPS and tokens[j].text != ">":
        if tokens[j].text == "const":
            return True
        if tokens[j].text == "<":
            j = matching_angle(tokens, j) or j
        j += 1
    return False


def mark_float_literals(tokens):
    """Makes literals without a suffix float, as they are in MSL, and rewrites its suffixes h and bf."""
    for token in tokens:
        if token.kind != "num":
            continue
        text = token.text.lower()
        hexadecimal = text.startswith("0x")
        if not ("p" in text if hexadecimal else "." in text or "e" in text):
            if not hexadecimal and text.endswith("h"):
                token.text = f"msl::half_literal({token.text[:-1]}.0f)"
            continue
        if text.endswith("bf"):
            token.text = f"msl::bfloat_literal({token.text[:-2]}f)"
        elif text.endswith("h"):
            token.text = f"msl::half_literal({token.text[:-1]}f)"
        elif text.endswith("l"):
            token.text = token.text[:-1] + "f"
        elif not text.endswith("f") or (hexadecimal and "p" not in text):
            token.text += "f"


# Words before a `::` that do not belong to it ("" is an erased one), so that it begins a name of the outermost scope.
_BEFORE_NAMES = {
    "auto", "case", "class", "const", "constexpr", "delete", "do", "else", "enum", "extern", "friend", "inline",
    "kernel", "METAL_FUNC", "mutable", "new", "operator", "return", "sizeof", "static", "struct", "template",
    "typedef", "typename", "union", "using", "void", "volatile", "",
} | SPACES  # fmt: skip


def name_outermost_scope(program):
    """Writes `MSL_ROOT::name` for `::name`: a target may compile the program inside a namespace."""
    tokens = program.tokens
    headers = {closing for declaration in program.walk() for _, closing in declaration.templates}
    for i, token in enumerate(tokens):
        before = tokens[i - 1]
        qualifies = before.text in (">", ">>", ")") or before.kind == "id" and before.text not in _BEFORE_NAMES
        if token.text == "::" and (not qualifies or i - 1 in headers):
            token.text = "MSL_ROOT::"


def rewrite_swizzles(program):
    """Writes `v.template swizzle<0, 1, 2>()` for `v.xyz`, with `swizzle_ref` where it is assigned to.

    A name that is also a member of a struct of the program becomes a call that vectors and the struct have: the struct
    gets functions of that name, told apart by a tag, which return the member.
    """
    tokens, members = program.tokens, _members_like_swizzles(program)
    for i in range(2, len(tokens) - 1):
        name = tokens[i].text
        if (
            tokens[i].kind == "id"
            and (tokens[i - 1].text == "->" or tokens[i - 1].text == "." and tokens[i - 2].text not in ("{", ","))
            and _SWIZZLE.fullmatch(name)
            and tokens[i + 1].text != "("
        ):
            indices = ", ".join(str(("xyzw" if name[0] in "xyzw" else "rgba").index(letter)) for letter in name)
            function = "swizzle_ref" if tokens[i + 1].text in _ASSIGNMENTS else "swizzle"
            tagged = name in members
            tokens[i].text = f"{function}({_tag(name)}())" if tagged else f"template {function}<{indices}>()"
    for name, bodies in members.items():
        for body in bodies:
            tokens[body].text += "".join(
                f" METAL_FUNC auto& {function}({_tag(name)}) {const}{{ return {name}; }}"
                for function in ("swizzle", "swizzle_ref")
                for const in ("", "const ")
            )


def _tag(name):
    return "msl::components<" + ", ".join(f"'{letter}'" for letter in name) + ">"


def _members_like_swizzles(program):
    """Returns {name: the indices of the opening braces of the structs that have such a member}."""
    tokens, found = program.tokens, {}
    for i, token in enumerate(tokens):
        body = program._class_body(i, len(tokens)) if token.text in ("struct", "class", "union") else None
        if body is None or _is_anonymous(program, i):
            continue
        j = body + 1
        while j < program.partner[body]:
            if tokens[j].text == "(" or tokens[j].text == "{" and not _is_anonymous(program, j - 1):
                j = program.partner[j]
            elif (
                tokens[j].kind == "id"
                and _SWIZZLE.fullmatch(tokens[j].text)
                and tokens[j + 1].text in (";", ",", "[", "=", "{")
                and body not in found.setdefault(tokens[j].text, [])
            ):
                found[tokens[j].text].append(body)
            j += 1
    return found


def _is_anonymous(program, i):
    """Returns whether the keyword at i begins an anonymous struct or union, whose members belong to the class around
    it."""
    tokens = program.tokens
    if tokens[i].text not in ("struct", "union") or tokens[i + 1].text != "{":
        return False
    return tokens[program.partner[i + 1] + 1].text == ";"
