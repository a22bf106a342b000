"""Brackets, attributes and parameters: the syntax of tokens that needs no knowledge of what they declare."""

from typing import Any

from ..errors import error_at
from .tokens import CLOSING, matching_angle

ATTRIBUTE_WORDS = ("__attribute__", "__attribute")
_GROUPED = (
    "alignas",
    *ATTRIBUTE_WORDS,
    "decltype",
    "noexcept",
    "explicit",
    "coherent",
    "typeof",
    "__typeof__",
)
_QUALIFIERS = {"const", "volatile", "device", "constant", "thread", "threadgroup", "static", "constexpr", "typename",
               "struct", "restrict", "__restrict", "inline", "register", "extern", "mutable"}  # fmt: skip
_TYPE_WORDS = _QUALIFIERS | {
    "unsigned",
    "signed",
    "int",
    "char",
    "short",
    "long",
    "float",
    "half",
    "bool",
    "void",
    "auto",
    "double",
}


class Syntax:
    """Tokens with their brackets paired."""

    def __init__(self, tokens):
        self.tokens = tokens
        self.partner = _pair_brackets(tokens)

    def text(self, first, last):
        return " ".join(token.text for token in self.tokens[first:last] if token.text)

    def _grouped(self, i):
        return self.tokens[i].text in _GROUPED and i + 1 < len(self.tokens) and self.tokens[i + 1].text == "("

    def angle_end(self, i, end=None):
        """Returns the index after the template's arguments that begin with the `<` at i.

        Raises:
            MSLError: nothing closes them.
        """
        close = matching_angle(self.tokens, i, end)
        if close is None:
            raise error_at(self.tokens[i], "expected '>' at the end of the template's arguments")
        return close + 1

    # Attributes -----------------------------------------------------------------------------------------------------

    def attribute_end(self, i):
        """Returns the index after `[[…]]` where one begins at i, else None."""
        tokens = self.tokens
        if tokens[i].text == "[" and i + 1 < len(tokens) and tokens[i + 1].text == "[":
            inner, outer = self.partner[i + 1], self.partner[i]
            if outer == inner + 1:
                return outer + 1
        return None

    def read_attributes(self, first, last):
        """Returns {name: argument tokens} of every `[[…]]` in tokens[first:last] that is outside of other brackets."""
        found, i = {}, first
        while i < last:
            end = self.attribute_end(i)
            if end is not None:
                self._read_attribute_list(i + 2, end - 2, found)
                i = end
            elif self.tokens[i].text in CLOSING:
                i = self.partner[i] + 1
            else:
                i += 1
        return found

    def _read_attribute_list(self, i, end, found):
        tokens = self.tokens
        while i < end:
            if tokens[i].kind == "id":
                name, argument = tokens[i].text, []
                while i + 2 < end and tokens[i + 1].text == "::":
                    i += 2
                    name = tokens[i].text
                if i + 1 < end and tokens[i + 1].text == "(":
                    argument = tokens[i + 2 : self.partner[i + 1]]
                    i = self.partner[i + 1]
                found[name] = argument
            i += 1

    # Parameters -----------------------------------------------------------------------------------------------------

    def split_parameters(self, opening, closing):
        """Returns the (first, last) indices of the parameters between two parentheses (or template brackets)."""
        tokens, parts, start, i = self.tokens, [], opening + 1, opening + 1
        while i < closing:
            text = tokens[i].text
            if text in CLOSING:
                i = self.partner[i]
            elif text == "<" and tokens[i - 1].kind == "id":
                i = matching_angle(tokens, i, closing) or i
            elif text == ",":
                parts.append((start, i))
                start = i + 1
            i += 1
        if start < closing:
            parts.append((start, closing))
        return parts

    def type_text(self, first, last):
        """Returns the text of a parameter's type: without its name and default."""
        name_at = self.declarator_name(first, last)
        end = next((i for i in range(first, last) if self.tokens[i].text == "="), last)
        return " ".join(self.tokens[i].text for i in range(first, end) if i != name_at and self.tokens[i].text)

    def declarator_name(self, first, last):
        """Returns the index of the name that a parameter or variable declares, or None where it has none."""
        tokens, name, i, words, before = self.tokens, None, first, 0, None
        while i < last:
            attribute = self.attribute_end(i)
            text = tokens[i].text
            if attribute is not None or not text:
                i = attribute or i + 1
                continue
            if text in ("=", "[", ":"):
                break
            if self._grouped(i):
                i = self.partner[i + 1]
                words += 1
            elif text == "(" and tokens[i + 1].text in ("*", "&"):
                return i + 2 if tokens[i + 2].kind == "id" else None
            elif text == "<":
                i = matching_angle(tokens, i, last) or i
            elif tokens[i].kind == "id":
                after_type = (
                    before is not None
                    and before.text not in ("typename", "struct")
                    and (before.kind == "id" or before.text in ("*", "&", "&&", ">", ">>", "]", "...", ")"))
                )
                name = i if words and after_type and text not in _TYPE_WORDS else None
                words += text not in _QUALIFIERS
            elif text not in ("*", "&", "&&", "...", "::"):
                name = None
            before = tokens[i]
            i += 1
        return name


def _pair_brackets(tokens):
    partner: list[Any] = [None] * len(tokens)  # the index of the other bracket; None for other tokens
    open_brackets = []
    for i, token in enumerate(tokens):
        if token.kind != "op":
            continue
        if token.text in CLOSING:
            open_brackets.append(i)
        elif token.text in (")", "]", "}"):
            if not open_brackets or CLOSING[tokens[open_brackets[-1]].text] != token.text:
                if open_brackets:
                    before = tokens[open_brackets[-1]]
                    raise error_at(
                        token,
                        f"expected '{CLOSING[before.text]}' (to match '{before.text}' at line {before.line}) "
                        f"before '{token.text}'",
                    )
                raise error_at(token, f"extraneous '{token.text}'")
            j = open_brackets.pop()
            partner[i], partner[j] = j, i
    if open_brackets:
        token = tokens[open_brackets[-1]]
        raise error_at(token, f"expected '{CLOSING[token.text]}' to match this '{token.text}'")
    return partner
