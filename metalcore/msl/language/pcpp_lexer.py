"""The lexer under pcpp: it knows C++ numbers and operators.

pcpp's own lexer splits ``1.f``, and would expand a macro named ``f`` in it.
"""

import copy

from .tokens import LEXICAL

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
    """The fields of a token that pcpp reads; pcpp adds `expanded_from`."""

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
    """pcpp's tokens of a text, at the place of another token."""
    lexer, tokens = Lexer(), []
    lexer.input(text)
    while token := lexer.token():
        token.lineno, token.lexpos = at.lineno, at.lexpos
        if hasattr(at, "source"):
            token.source = at.source
        tokens.append(token)
    return tokens
