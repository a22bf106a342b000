"""The tokens of preprocessed MSL, and functions that walk over brackets.

A token keeps its file, its line and the blanks before it, so that translated code can be printed with the user's own
lines and columns.
"""

import re

from ..errors import error_at
from .limits import MAX_NESTING

# The order matters: longer operators come first, and a preprocessing number comes before a dot.
LEXICAL = re.compile(
    r"""
    (?P<ws>[ \t\r\f\v]+)
  | (?P<newline>\n)
  | (?P<continuation>\\[ \t]*\n)
  | (?P<comment>//(?:[^\n\\]|\\(?:.|\n))*|/\*(?:.|\n)*?\*/)
  | (?P<str>(?:u8|u|U|L)?R"(?P<delimiter>[^()\\\s]{0,16})\((?:.|\n)*?\)(?P=delimiter)"
      |(?:u8|u|U|L)?"(?:[^"\\\n]|\\(?:.|\n))*")
  | (?P<char>(?:u8|u|U|L)?'(?:[^'\\\n]|\\.)+')
  | (?P<id>[A-Za-z_$][\w$]*)
  | (?P<num>\.?\d(?:[eEpP][+-]|'(?=\w)|[\w.])*)
  | (?P<op>\#\#|\.\.\.|<<=|>>=|->\*|\.\*|::|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|.)
    """,
    re.VERBOSE,
)

CLOSING = {"(": ")", "[": "]", "{": "}"}


class Token:
    __slots__ = ("file", "kind", "line", "space", "text")

    def __init__(self, kind, text, line=1, file="program_source", space=""):
        self.kind = kind  # id, num, str, char or op
        self.text = text
        self.line = line
        self.file = file
        self.space = space

    def __repr__(self):
        return f"{self.text!r}@{self.file}:{self.line}"


def tokenize(text, file="program_source", line=1):
    """Returns the tokens of preprocessed text, which has no directives."""
    tokens, space = [], ""
    for match in LEXICAL.finditer(text):
        kind, value = match.lastgroup, match.group()
        if kind == "delimiter":
            kind = "str"
        if kind == "ws":
            space += value
        elif kind in ("newline", "continuation", "comment"):
            line += value.count("\n")
            space = "" if "\n" in value else space + " "
        else:
            tokens.append(Token(kind, value, line, file, space))
            line += value.count("\n")
            space = ""
    return tokens


def matching(tokens, i):
    """Returns the index of the bracket that closes tokens[i] (one of ``( [ {``); len(tokens) where it is never
    closed."""
    opening, closing = tokens[i].text, CLOSING[tokens[i].text]
    depth = 0
    for j in range(i, len(tokens)):
        text = tokens[j].text
        if text == opening:
            depth += 1
        elif text == closing:
            depth -= 1
            if depth == 0:
                return j
    return len(tokens)


def matching_angle(tokens, i, end=None):
    """Returns the index of the ``>`` (or ``>>``) that closes the template list opened by ``<`` at i, or None where the
    tokens cannot be a template list. A ``<`` inside counts as an operator unless it follows a name."""
    depth, j, end = 1, i + 1, len(tokens) if end is None else end
    while j < end:
        text = tokens[j].text
        if text == "<" and tokens[j - 1].kind == "id":
            depth += 1
        elif text in (">", ">>"):
            depth -= len(text)
            if depth <= 0:
                return j
        elif text in CLOSING:
            j = matching(tokens, j)
        elif text in (";", ")", "]", "}"):
            return None
        j += 1
    return None


def refuse_deep_nesting(tokens):
    """Raises an MSLError where more than 256 brackets or template headers (Clang's limit) are nested."""
    depth = headers = 0
    for before, token in zip([None, *tokens], tokens):
        if token.text in CLOSING:
            depth += 1
        elif token.text in (")", "]", "}"):
            depth -= 1
        elif token.text == "template" and before is not None:
            headers += before.text in ("<", ",", ">")
        if token.text in ("{", "}", ";"):
            headers = 0
        if max(depth, headers) > MAX_NESTING:
            raise error_at(token, f"bracket nesting level exceeded maximum of {MAX_NESTING}")
