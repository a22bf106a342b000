"""The program's own tokens in their own order, for Clang to judge where specifiers and attributes stand.

The other readings move threadgroup variables and erase attributes. Here nothing is moved or erased: address spaces are
the OpenCL keywords, at which the grammar has the same places, and each attribute of MSL has the name of one of Clang's
that belongs to the same thing. Types differ from MSL's, so that only Clang's parser and its judgement of attributes
count (clang.py).
"""

from ..language.kernels import BUILTINS
from ..language.tokens import CLOSING
from ..language.translate import _print as print_tokens
from .text import RENAMED, SUFFIX, literal

_HEAD = """#define MSL_SWIZZLES_2(T)
#define MSL_SWIZZLES_3(T)
#define MSL_SWIZZLES_4(T)
#include "prelude.h"
"""
_SPACES = """#define device __global
#define constant __constant
#define threadgroup __local
#define thread __private
#define kernel __kernel
"""
_OF_PARAMETERS = {*BUILTINS, "buffer", "threadgroup"}
_OF_FUNCTIONS = {"kernel", "host_name", "max_total_threads_per_threadgroup", "required_threads_per_threadgroup"}
_OF_ANYTHING = {"function_constant", "id"}
_NAMES = (
    dict.fromkeys(_OF_PARAMETERS, 'clang::use_handle("")')
    | dict.fromkeys(_OF_FUNCTIONS, "gnu::cold")
    | dict.fromkeys(_OF_ANYTHING, 'clang::annotate("")')
)


def raw_text(program, headers=""):
    """Returns the program, none of whose tokens has changed yet, as Clang reads it in its own order.

    Args:
        headers: #include lines of further headers.
    """
    tokens = program.tokens
    texts, attribute, nameless = {}, 0, _nameless_parameters(program)
    for i, token in enumerate(tokens):
        if i < attribute:
            continue
        end = program.attribute_end(i)
        if end is not None:
            texts.update(_in_gnu_form(program, i, end) if i in nameless else _attributes(program, i + 2, end - 2))
            attribute = end
        elif token.text in RENAMED and not (token.text == "private" and tokens[i + 1].text == ":"):
            texts[i] = token.text + SUFFIX
        elif token.text == "coherent":  # a qualifier as volatile is
            texts[i] = "volatile"
            if tokens[i + 1].text == "(":
                texts.update(dict.fromkeys(range(i + 1, program.partner[i + 1] + 1), ""))
        elif token.kind == "num":
            texts[i] = literal(token.text)
    for declaration in program.declarations:
        if declaration.kind == "instantiation":
            texts.update(_of_instantiation(program, declaration))
    return (
        _HEAD
        + headers
        + _SPACES
        + print_tokens([_Token(token, texts.get(i, token.text)) for i, token in enumerate(tokens)])
    )


class _Token:
    """A token with another text."""

    def __init__(self, token, text):
        self.kind, self.line, self.file, self.space = token.kind, token.line, token.file, token.space
        self.text = text


def _attributes(program, i, end):
    """Clang's names for the attributes between brackets, whose arguments other rules judge."""
    tokens = program.tokens
    while i < end:
        if tokens[i].text in _NAMES and tokens[i - 1].text != "::":
            yield i, _NAMES[tokens[i].text]
            if tokens[i + 1].text == "(":
                last = program.partner[i + 1]
                yield from ((j, "") for j in range(i + 1, last + 1))
                i = last
        elif tokens[i].text in CLOSING:
            i = program.partner[i]
        i += 1


def _in_gnu_form(program, i, end):
    """Yields the attributes of MSL at i as __attribute__, which Clang takes in two places where it does not take [[…]],
    and published kernels have it: after the type of a parameter without a name, and after `template` in an explicit
    instantiation."""
    named = dict(_attributes(program, i + 2, end - 2))
    names = [text.split("::")[1] for text in named.values() if text]
    if names:
        yield i, "".join(f" __attribute__(({name}))" for name in names)
        yield from ((j, "") for j in range(i + 1, end))


def _nameless_parameters(program):
    """Returns the indices of the tokens of parameters without a name."""
    indices = set()
    for declaration in program.walk():
        if declaration.parameters is not None:
            for first, last in program.split_parameters(*declaration.parameters):
                if program.declarator_name(first, last) is None:
                    indices.update(range(first, last))
    return indices


def _of_instantiation(program, declaration):
    i = declaration.first + 1
    while (end := program.attribute_end(i)) is not None:
        yield from _in_gnu_form(program, i, end)
        i = end
