"""The 64-bit integer arithmetic of C++'s constant expressions, for `#if` and the arguments of attributes.

The expression is read from left to right with stacks of values and of operators, so that no nesting is too deep.
Operands that `&&`, `||` and `?:` skip are read without being computed: they may divide by zero.
"""

import re
from typing import NamedTuple

_BITS = 64
_MASK = (1 << _BITS) - 1
_UNARY = 20
# Operator -> (how tightly it binds, its function).
_BINARY = {
    "*": (14, lambda a, b: a * b),
    "/": (14, lambda a, b: (abs(a) // abs(b)) * _sign(a) * _sign(b)),
    "%": (14, lambda a, b: abs(a) % abs(b) * _sign(a)),
    "+": (13, lambda a, b: a + b),
    "-": (13, lambda a, b: a - b),
    "<<": (12, lambda a, b: a << b),
    ">>": (12, lambda a, b: a >> b),
    "<": (11, lambda a, b: a < b),
    "<=": (11, lambda a, b: a <= b),
    ">": (11, lambda a, b: a > b),
    ">=": (11, lambda a, b: a >= b),
    "==": (10, lambda a, b: a == b),
    "!=": (10, lambda a, b: a != b),
    "&": (9, lambda a, b: a & b),
    "^": (8, lambda a, b: a ^ b),
    "|": (7, lambda a, b: a | b),
    "&&": (6, lambda a, b: bool(a and b)),
    "||": (5, lambda a, b: bool(a or b)),
    "?": (4, None),
    ":": (4, None),
}
_COMPARISONS = {"<", "<=", ">", ">=", "==", "!="}
OPERATOR_WORDS = {
    "and": "&&", "or": "||", "not": "!", "bitand": "&", "bitor": "|", "xor": "^", "compl": "~", "not_eq": "!=",
}  # fmt: skip
_NUMBER = re.compile(
    r"(?i)(?:0x(?P<hex>[0-9a-f]+)|0b(?P<binary>[01]+)|(?P<octal>0[0-7]*)|(?P<decimal>[1-9]\d*))"
    r"(?P<suffix>u?(?:ll?)?|ll?u)"
)
_BASES = {"hex": 16, "binary": 2, "octal": 8, "decimal": 10}
_CHARACTER = re.compile(r"(?P<prefix>u8|u|U|L)?'(?P<body>.+)'", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]+)|([0-7]{1,3})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|(.)", re.DOTALL)
_ESCAPES = {"n": 10, "t": 9, "r": 13, "a": 7, "b": 8, "f": 12, "v": 11, "\\": 92, "'": 39, '"': 34, "?": 63}


class Integer(NamedTuple):
    """A value in 64 bits, signed or not."""

    value: int
    unsigned: bool = False


class ArithmeticFailure(ValueError):
    """What is wrong with an expression."""


class _Operator(NamedTuple):
    text: str
    binds: int
    skips: bool = False  # whether its right side is read without being computed
    condition: bool = False  # the value before `?`
    chosen: Integer = Integer(0)  # the value between `?` and `:`


def evaluate(words, name_value):
    """Returns the value of an expression, as an Integer.

    Args:
        words: texts of the expression's tokens.
        name_value: a function from a name to its int, or None for a name without one. `true` and `false` are known.

    Raises:
        ArithmeticFailure: the expression is malformed, divides by zero, or shifts by a count outside of 0 to 63.
    """
    return _Evaluation(name_value).run(words)


class _Evaluation:
    def __init__(self, name_value):
        self.name_value = name_value
        self.values, self.operators = [], []
        self.skipping = 0  # how many operators on the stack skip their right sides

    def run(self, words):
        wants_value = True
        for word in words:
            word = OPERATOR_WORDS.get(word, word)
            if wants_value:
                if word in ("+", "-", "~", "!"):
                    self.operators.append(_Operator(word, _UNARY))
                elif word == "(":
                    self.operators.append(_Operator("(", 0))
                else:
                    self.values.append(self.operand(word))
                    wants_value = False
            elif word == ")":
                self.reduce(1)
                if not self.operators:
                    raise ArithmeticFailure("extraneous ')'")
                if self.operators.pop().text != "(":
                    raise ArithmeticFailure("expected ':' after '?'")
            elif word in _BINARY:
                self.operator(word)
                wants_value = True
            else:
                raise ArithmeticFailure(f"'{word}' is no operator of an integer constant expression")
        if wants_value:
            raise ArithmeticFailure("expected a value at the end of the expression" if words else "there is none")
        self.reduce(1)
        if self.operators:
            text = self.operators[-1].text
            raise ArithmeticFailure("expected ')'" if text == "(" else "expected ':' after '?'")
        return self.values.pop()

    def operand(self, word):
        if word[0].isdigit() or word[0] == ".":
            return _number(word)
        if word.endswith("'"):
            return _character(word)
        if word in ("true", "false"):
            return Integer(int(word == "true"))
        if word[0].isalpha() or word[0] in "_$":
            value = self.name_value(word)
            if value is None:
                raise ArithmeticFailure(f"'{word}' is no integer constant")
            return _wrapped(value, False)
        raise ArithmeticFailure(f"expected a value before '{word}'")

    def operator(self, word):
        binds = _BINARY[word][0]
        # `?` and `:` bind from right to left.
        self.reduce(binds + (word == "?"))
        if word == ":":
            self.alternative()
            return
        skips, condition = False, False
        if word in ("&&", "||", "?"):
            condition = bool(self.values[-1].value)
            skips = condition == (word == "||")
        if word == "?":
            self.values.pop()
            binds = 1  # only its `:` ends it
        self.skipping += skips
        self.operators.append(_Operator(word, binds, skips, condition))

    def alternative(self):
        """Goes on from the value after a `?` to the one after its `:`."""
        if not self.operators or self.operators[-1].text != "?":
            raise ArithmeticFailure("':' without '?'")
        question = self.operators.pop()
        self.skipping += question.condition - question.skips
        colon = _Operator(":", _BINARY[":"][0], question.condition, question.condition, self.values.pop())
        self.operators.append(colon)

    def reduce(self, binds):
        """Applies the operators that bind at least as tightly as `binds`, the last one first."""
        while self.operators and self.operators[-1].binds >= max(binds, 2):
            operator = self.operators.pop()
            self.skipping -= operator.skips
            right = self.values.pop()
            if operator.binds == _UNARY:
                self.values.append(_unary(operator.text, right))
            elif operator.text == ":":
                value = (operator.chosen if operator.condition else right).value
                self.values.append(_wrapped(value, operator.chosen.unsigned or right.unsigned))
            else:
                self.values.append(self.binary(operator.text, self.values.pop(), right))

    def binary(self, text, left, right):
        unsigned = left.unsigned if text in ("<<", ">>") else left.unsigned or right.unsigned
        if text in ("&&", "||"):
            unsigned = False
        elif text not in ("<<", ">>"):
            left, right = _wrapped(left.value, unsigned), _wrapped(right.value, unsigned)
        problem = None
        if text in ("/", "%") and right.value == 0:
            problem = "division by zero" if text == "/" else "remainder of a division by zero"
        elif text in ("<<", ">>") and not 0 <= right.value < _BITS:
            problem = f"shift by {right.value}, which is not 0 to {_BITS - 1}"
        if problem:
            if not self.skipping:
                raise ArithmeticFailure(problem)
            return Integer(0, unsigned)
        return _wrapped(int(_BINARY[text][1](left.value, right.value)), unsigned and text not in _COMPARISONS)


def _sign(value):
    return -1 if value < 0 else 1


def _wrapped(value, unsigned):
    value &= _MASK
    return Integer(value if unsigned or value >> (_BITS - 1) == 0 else value - (1 << _BITS), unsigned)


def _unary(text, operand):
    if text == "!":
        return Integer(int(not operand.value))
    value = {"+": operand.value, "-": -operand.value, "~": ~operand.value}[text]
    return _wrapped(value, operand.unsigned)


def _number(word):
    match = _NUMBER.fullmatch(re.sub(r"(?i)(?<=[0-9a-f])'(?=[0-9a-f])", "", word))
    if match is None:
        raise ArithmeticFailure(f"'{word}' is no integer")
    base = next(base for base in _BASES if match[base] is not None)
    value = int(match[base], _BASES[base])
    if value > _MASK:
        raise ArithmeticFailure(f"'{word}' does not fit in {_BITS} bits")
    return _wrapped(value, "u" in match["suffix"].lower() or value >> (_BITS - 1) == 1)


def _character(word):
    """Returns a character's code. Several characters are the bytes of an int from the left, as in Clang."""
    match = _CHARACTER.fullmatch(word)
    if match is None:
        raise ArithmeticFailure(f"'{word}' is no character")
    codes = []
    for hexadecimal, octal, short, long, escape, plain in _ESCAPE.findall(match["body"]):
        if escape and escape not in _ESCAPES:
            raise ArithmeticFailure(f"unknown escape sequence '\\{escape}'")
        digits = hexadecimal or short or long
        codes.append(
            int(digits, 16) if digits else int(octal, 8) if octal else _ESCAPES[escape] if escape else ord(plain)
        )
    if match["prefix"]:
        if len(codes) > 1:
            raise ArithmeticFailure(f"{word} has more than one character")
        return _wrapped(codes[0], match["prefix"] != "L")
    if max(codes) > 255 or len(codes) > 4:
        raise ArithmeticFailure(f"{word} does not fit in {'an int' if len(codes) > 1 else 'a char'}")
    bits = 32 if len(codes) > 1 else 8
    value = int.from_bytes(bytes(codes), "big")
    return Integer(value - (1 << bits) if value >> (bits - 1) else value)
