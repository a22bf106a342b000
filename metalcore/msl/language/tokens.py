"""The tokens of preprocessed MSL, and functions that walk over brackets.

A token keeps its file, its line and the blanks before it, so that translated code can be printed with the user's own
lines and columns.
"""

import copy
import re

from ..errors import error_at
from .numbers import MAX_NESTING

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


_TYPES = {
    "ws": "CPP_WS",
    "newline": "CPP_WS",
    "continuation": "CPP_LINECONT",
    "id": "CPP_ID",
    "str": "CPP_STRING",
    "delimiter": "CPP_STRING",
    "char": "CPP_CHAR",
}
_OPERATORS = {
    "#": "POUND", "##": "DPOUND", "+": "PLUS", "-": "MINUS", "*": "STAR", "/": "FSLASH", "%": "PERCENT", "|": "BAR",
    "&": "AMPERSAND", "~": "TILDE", "^": "HAT", "<": "LESS", ">": "GREATER", "=": "EQUAL", "!": "EXCLAMATION",
    "?": "QUESTION", "(": "LPAREN", ")": "RPAREN", "[": "LBRACKET", "]": "RBRACKET", "{": "LCURLY", "}": "RCURLY",
    ".": "DOT", ",": "COMMA", ";": "SEMICOLON", ":": "COLON", "\\": "BSLASH", "->": "DEREFERENCE", "-=": "MINUSEQUAL",
    "--": "MINUSMINUS", "<<": "LSHIFT", "<=": "LESSEQUAL", ">>": "RSHIFT", ">=": "GREATEREQUAL", "||": "LOGICALOR",
    "|=": "OREQUAL", "&&": "LOGICALAND", "&=": "ANDEQUAL", "==": "EQUALITY", "!=": "INEQUALITY", "^=": "XOREQUAL",
    "*=": "MULTIPLYEQUAL", "/=": "DIVIDEEQUAL", "+=": "PLUSEQUAL", "++": "PLUSPLUS", "%=": "PERCENTEQUAL",
    "<<=": "LSHIFTEQUAL", ">>=": "RSHIFTEQUAL",
}  # fmt: skip


class LexToken:
    """The fields of a token that pcpp reads; pcpp adds `source` and `expanded_from`."""

    source: str

    def __init__(self, type, value, lineno, lexpos):
        self.type, self.value, self.lineno, self.lexpos = type, value, lineno, lexpos


class Lexer:
    """Stands in for pcpp's PLY lexer. It reads with the pattern that the rest of the front end uses."""

    def __init__(self):
        self.lineno = 1

    def clone(self):
        return copy.copy(self)

    def input(self, text):
        self.lineno = 1
        self._matches = LEXICAL.finditer(text)

    def token(self):
        match = next(self._matches, None)
        if match is None:
            return None
        kind, text = match.lastgroup, match.group()
        if kind in _TYPES:
            type = _TYPES[kind]
            if kind == "continuation":
                text = text[1:-1]
        elif kind == "op":
            type = "CPP_" + _OPERATORS.get(text, "OTHER")
        elif kind == "num":
            type = "CPP_INTEGER" if text.rstrip("uUlL").isalnum() else "CPP_FLOAT"
        else:
            type = "CPP_COMMENT1" if text.startswith("/*") else "CPP_COMMENT2"
        token = LexToken(type, text, self.lineno, match.start())
        self.lineno += match.group().count("\n")
        return token


def lexed(text, at):
    """Returns pcpp's tokens of a text, at the place of another token."""
    lexer, tokens = Lexer(), []
    lexer.input(text)
    while token := lexer.token():
        token.lineno, token.lexpos = at.lineno, at.lexpos
        if hasattr(at, "source"):
            token.source = at.source
        tokens.append(token)
    return tokens
