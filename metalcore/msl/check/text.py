"""MSL as the text that Clang checks: C++ for OpenCL, with the user's own lines.

Clang has OpenCL's address spaces and one more, `__global_device`, which converts to `__global`. With that one for
`device`, and const `__global` for `constant`, objects in any space can be copied and their methods called, and no other
mixture of spaces passes.
"""

import re
from itertools import pairwise

from ..language.conditionals import wrap_conditionals
from ..language.duplicates import drop_duplicates
from ..language.rewrite import erase, erase_attributes
from ..language.threadgroup import place_threadgroup_variables
from ..language.translate import _print as print_tokens

SPACES = {
    "device": "MSL_DEVICE",  # a macro of prelude.h
    "constant": "const __global",
    "threadgroup": "__local",
    "thread": "__private",
}
# `this` cannot be in opencl_global_device: const alone tells methods for device objects from those for constant ones.
_METHOD_SPACES = {**SPACES, "device": "__global", "constant": "__global"}
# Names that are free in MSL, and keywords or functions in Clang.
RENAMED = {"global", "local", "private", "generic", "read_only", "write_only", "read_write", "pipe", "event_t"}
SUFFIX = "_of_msl"
_SWIZZLE = re.compile(r"[xyzw]{2,4}|[rgba]{1,4}")
_NUMBER = re.compile(r"(u?(char|short|int|long)|half|bfloat|float|bool|size_t|u?int(8|16|32|64)_t)[234]?")
_VECTOR = re.compile(r"(packed_)?(u?(char|short|int|long)|half|bfloat|float|bool)[234]")
_DESCRIPTORS = {"matmul2d_descriptor", "convolution2d_descriptor"}
_HALF = re.compile(r"(?i)(?!0x)(.*\d\.?)h")
_UNTYPED = re.compile(r"(?i)(?!0x)(\d+\.\d*|\.\d+)(e[+-]?\d+)?|(?!0x)\d+e[+-]?\d+")
_BFLOAT = re.compile(r"(?i)(?!0x)(.*\d\.?)bf")


def clang_text(program, variables, headers=""):
    """Returns the program as Clang reads it, with the headers it needs.

    Args:
        program: its tokens are changed.
        variables: its threadgroup variables, from find_threadgroup_variables().
        headers: #include lines of further headers.

    Returns:
        (the text, places {(file, line)} of references that are in no address space in the text, and in `thread` in
        MSL).
    """
    tokens = program.tokens
    prelude = "".join([*_swizzles(program), '#include "prelude.h"\n', headers, *_constructors(program)])
    for declaration in program.walk():
        if declaration.kind == "variable" and "function_constant" in declaration.attributes:
            for token in tokens[declaration.head : declaration.name_at]:
                if token.text in ("static", "constexpr", "inline"):
                    token.text = ""
                elif token.text == "constant":
                    token.text = "extern " + SPACES["constant"]
    erase_attributes(program)
    _erase_kernel_keyword(program)
    originals = [token.text for token in tokens]
    _erase_twins(program)
    _rewrite_methods(program)
    lenient = _rewrite_parameters(program)
    _rewrite_function_parameters(program)
    _number_descriptors(program)
    for i, token in enumerate(tokens):
        if token.text == "coherent":
            erase(tokens, i, i + 4 if tokens[i + 1].text == "(" else i + 1)
        elif token.text in SPACES:
            token.text = "" if token.text == "thread" and _has_other_space(tokens, i) else SPACES[token.text]
        elif token.text in RENAMED and not (token.text == "private" and tokens[i + 1].text == ":"):
            token.text += SUFFIX
        elif token.kind == "num":
            token.text = literal(token.text)
        elif token.kind == "str" and token.text and not _is_message(program, i):
            following = tokens[i + 1].kind == "str"
            opening = "" if tokens[i - 1].kind == "str" else "msl::literal("
            token.text = opening + token.text + ("" if following else ")")
    drop_duplicates(program, originals)
    _choose(program)
    place_threadgroup_variables(program, variables)
    return prelude + print_tokens(tokens), lenient


def _has_other_space(tokens, i):
    """Returns whether another address space stands beside the `thread` at i, which then has no meaning."""
    j = i + 1
    while tokens[j].text in ("const", "volatile"):
        j += 1
    return tokens[j].text in SPACES and tokens[j].text != "thread"


def _choose(program):
    """Writes `c ? a : b` as a call: for Clang, arms in an address space and in none, or a bfloat and an int, have no
    common type."""
    wrap_conditionals(program)
    for token in program.tokens:
        for before, after in (("msl::chosen(", "msl::choose("), ("? msl::arm(", ", ("), (": msl::arm(", ", (")):
            token.text = token.text.replace(before, after)


def _swizzles(program):
    """Definitions of the vectors' components that the program mentions, for each width."""
    tokens = program.tokens
    used = sorted(
        {
            token.text
            for i, token in enumerate(tokens)
            if i and token.kind == "id" and tokens[i - 1].text in (".", "->") and _SWIZZLE.fullmatch(token.text)
        }
    )
    for width in (2, 3, 4):
        components = []
        for name in used:
            letters = "xyzw" if name[0] in "xyzw" else "rgba"
            if set(name) <= set(letters[:width]):
                kind = "MSL_COMPONENT" if len(set(name)) == len(name) else "MSL_READ_ONLY"
                type_ = "T" if len(name) == 1 else f"MSL_VECTOR(T, {len(name)})"
                components.append(f" {kind}({type_}, {name})")
        yield f"#define MSL_SWIZZLES_{width}(T)" + "".join(components) + "\n"


def _constructors(program):
    """Definitions that make float4(a, b) a call where the vectors are Clang's own: macros named as the types."""
    tokens = program.tokens
    called = {a.text for a, b in pairwise(tokens) if b.text == "(" and _VECTOR.fullmatch(a.text)}
    called -= {b.text for a, b in pairwise(tokens) if a.text == "operator"}
    called -= {a.text for a, b, c in zip(tokens, tokens[1:], tokens[2:]) if b.text == "(" and c.text in ("&", "*")}
    if called:
        yield "#ifndef __OPENCL_CPP_VERSION__\n"
        yield from (f"#define {name}(...) msl::vector<::{name}>(__VA_ARGS__)\n" for name in sorted(called))
        yield "#endif\n"


def _erase_kernel_keyword(program):
    """Erases the keyword `kernel`: Clang knows it, and allows no templates of kernels."""
    for declaration in program.declarations:
        if declaration.kind in ("function", "instantiation"):
            end = declaration.name_at if declaration.name_at is not None else declaration.last
            for token in program.tokens[declaration.head : end]:
                if token.text == "kernel":
                    token.text = ""


def _erase_twins(program):
    """Erases a method for objects in `constant` beside one for const objects in `device`: for Clang both are in the
    same address space."""
    methods = {}
    for declaration in program.walk():
        if declaration.kind == "function" and declaration.in_class:
            end = declaration.body[0] if declaration.body else declaration.last
            after = {token.text for token in program.tokens[declaration.parameters[1] : end]}
            types = tuple(program.type_text(*part) for part in program.split_parameters(*declaration.parameters))
            name = program.text(declaration.name_at, declaration.parameters[0])
            space = "constant" if "constant" in after else "device" if {"const", "device"} <= after else ""
            methods.setdefault((id(declaration.owner), name, types), {})[space] = declaration
    for found in methods.values():
        if {"constant", "device"} <= found.keys():
            erase(program.tokens, found["constant"].first, found["constant"].last)


def _rewrite_methods(program):
    """Rewrites the address spaces after a method's parameters, which say where its object is. Those of constructors go:
    for Clang a temporary is in no address space."""
    tokens = program.tokens
    for declaration in program.walk():
        if declaration.kind != "function" or not declaration.in_class or not tokens[declaration.first].text:
            continue
        constructor = declaration.name == declaration.owner.name
        before = {token.text for token in tokens[declaration.head : declaration.parameters[0]]}
        end = declaration.body[0] if declaration.body else declaration.last
        after = {token.text for token in tokens[declaration.parameters[1] : end]}
        if not (constructor or before & {"static", "friend", "~"} or after & set(SPACES)):
            tokens[declaration.parameters[1]].text = ") MSL_THIS"
        if declaration.body and "device" in after and "device" in before and before & {"*", "&"}:
            _return_in_device(program, *declaration.body)
        for i in range(declaration.parameters[1] + 1, declaration.last):
            text = tokens[i].text
            if text in ("{", ":", "=", "->", ";"):
                break
            if text in SPACES:
                implied = "const " if text == "constant" and tokens[i - 1].text != "const" else ""
                tokens[i].text = "" if constructor else implied + _METHOD_SPACES[text]


def _return_in_device(program, first, last):
    """Puts what a method for objects in `device` returns of its object in `device`: for Clang it is in `__global`."""
    for i in range(first, last):
        if program.tokens[i].text == "return":
            end = next(j for j in range(i, last) if program.tokens[j].text == ";")
            program.tokens[i].text = "return msl::in_device("
            program.tokens[end].text = ");"


def _rewrite_parameters(program):
    """Erases `thread` of a parameter `thread const int&`, which takes temporaries: for Clang only a reference in no
    address space does. Puts array parameters in `thread`."""
    tokens, places = program.tokens, set()
    for declaration in program.walk():
        if declaration.kind == "function":
            specialized = any(last == first + 1 for first, last in declaration.templates)
            for first, last in program.split_parameters(*declaration.parameters):
                part = tokens[first:last]
                words = {token.text for token in part}
                number = any(_NUMBER.fullmatch(word) for word in words)
                if {"thread", "const", "&"} <= words and number and not specialized:
                    for token in part:
                        places.add((token.file, token.line))
                        if token.text == "thread":
                            token.text = ""
                elif "[" in words and not words & {*SPACES, "*", "&", "[["}:
                    end = program.attribute_end(next(i for i in range(first, last) if tokens[i].text == "["))
                    if end is None:
                        part[0].text = "__private " + part[0].text
    return places


def _rewrite_function_parameters(program):
    """Makes a template's parameter that is a pointer to a function a reference: for Clang the pointer would point into
    the generic address space, where no function is."""
    tokens = program.tokens
    for declaration in program.walk():
        ranges = list(declaration.templates)
        if declaration.kind == "alias":
            ranges.append((declaration.first, declaration.last))
        for first, last in ranges:
            for i in range(first, last - 2):
                named = tokens[i + 2].kind == "id"
                if tokens[i].text == "(" and tokens[i + 1].text == "*" and tokens[i + 2 + named].text == ")":
                    if tokens[i + 3 + named].text == "(":
                        tokens[i + 1].text = "&"


def _number_descriptors(program):
    """Makes a template's parameter that is a descriptor of mpp::tensor_ops a number, as which prelude.h's classes take
    it: in C++ for OpenCL, which is C++17, it cannot have a class."""
    tokens = program.tokens
    for declaration in program.walk():
        for first, last in declaration.templates:
            for i in range(first + 1, last - 1):
                if tokens[i].text in _DESCRIPTORS and tokens[i + 1].kind == "id":
                    descriptor, name = tokens[i].text, tokens[i + 1].text
                    tokens[i].text = "size_t"
                    begin = i
                    while tokens[begin - 1].text == "::":  # the namespaces
                        begin -= 2
                    erase(tokens, begin, i)
                    for j in range(last, declaration.last - 1):
                        if tokens[j].text == name and tokens[j + 1].text == "." and tokens[j - 1].text != ".":
                            tokens[j].text = f"mpp::tensor_ops::{descriptor}::from({name})"


def _is_message(program, i):
    """Returns whether a string is a static_assert's message or the like, where C++ allows no call."""
    tokens = program.tokens
    if tokens[i - 1].text in ("extern", "asm", "__asm__", "__asm"):
        return True
    while i > 0 and tokens[i].text not in (";", "{", "}"):
        if tokens[i].text in ("static_assert", "__attribute__", "_Static_assert", "asm", "__asm", "__asm__"):
            return True
        i -= 1
    return False


def literal(text):
    """Returns a literal with MSL's suffix h or bf, as Clang reads it: it accepts h only after a fraction."""
    if match := _BFLOAT.fullmatch(text):
        return f"bfloat({match[1]}f)" if "." in match[1] or "e" in match[1].lower() else f"bfloat({match[1]}.0f)"
    if match := _HALF.fullmatch(text):
        return text if "." in match[1] or "e" in match[1].lower() else match[1] + ".0h"
    # A literal without a suffix is a float. In templates Clang needs the suffix to keep it one.
    return text + "f" if _UNTYPED.fullmatch(text) else text
