"""Reads and writes through pointers that were cast, which may not be aligned: Apple's GPUs accept them, NVIDIA's do
not.

These pointers are followed by name: from a cast into variables, members, parameters and results. Pointers that are
followed needlessly do no harm, since the C++ type decides in the end: `q[i]` becomes `msl::unaligned::read(q, i)`,
which is `q[i]` except for pointers to numbers, vectors and matrices (cuda/unaligned.h). It becomes `write(q, i)` where
it is assigned to, `place(q, i).x` where a component is, and `copy(q, i)` where it is all that is stored.
"""

import re

from .tokens import CLOSING, matching_angle

_SPACES = {"device", "constant", "threadgroup"}
_CASTS = {"reinterpret_cast", "static_cast"}
_ASSIGNMENTS = {"=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>="}
_KEYWORDS = {"return", "case", "else", "do", "sizeof", "throw", "co_return"}
_UNEVALUATED = {"sizeof", "decltype", "alignof", "noexcept"}
_IN_TYPES = {"*", "&", "::", "<", ">", ">>", ",", "+", "-", "/", "(", ")", "...", "[", "]"}
_NUMBER = re.compile(r"(u?(char|short|int|long)|float|half|bfloat|bool|size_t|u?int\d+_t)[2-4]?")


class Guards:
    """What find_unaligned_accesses() found; apply() writes it into the tokens."""

    def __init__(self, tokens):
        self._tokens = tokens
        self._accesses = []  # [(index, the token's text, text before it, text in its place, text after it)]
        self.count = 0

    def subscript(self, first, opening, closing, function):
        self._add((first, f"msl::unaligned::{function}(", None, ""), (opening, "", ", ", ""), (closing, "", ")", ""))

    def member(self, first, arrow, function):
        self._add((first, f"msl::unaligned::{function}(", None, ""), (arrow, "", ").", ""))

    def indirection(self, star, last, function):
        self._add((star, "", f"msl::unaligned::{function}(", ""), (last, "", None, ")"))

    def _add(self, *changes):
        self._accesses.append([(i, self._tokens[i].text, *texts) for i, *texts in changes])
        self.count += 1

    def apply(self):
        """Writes the guards. Other passes may have put text around a token's own; an access that they have moved stays
        as it is."""
        before, instead, after = {}, {}, {}
        for changes in self._accesses:
            if all(_parted(self._tokens[i].text, original) for i, original, *_ in changes):
                for i, original, first, own, last in changes:
                    before[i] = first + before.get(i, "")
                    after[i] = after.get(i, "") + last
                    instead[i] = original, instead.get(i, (original, original))[1] if own is None else own
        for i, (original, own) in instead.items():
            parted = _parted(self._tokens[i].text, original)
            assert parted is not None, original
            head, tail = parted
            self._tokens[i].text = head + before[i] + own + after[i] + tail


def _parted(text, own):
    """Returns the text that other passes have put before and after a token's own; None where its own is erased. Passes
    open brackets before it and close them after it."""
    pattern = rf"(?<!\w){own}(?!\w)" if re.fullmatch(r"\w+", own) else re.escape(own)
    places = [match.span() for match in re.finditer(pattern, text)]
    if not places:
        return None
    first, last = places[0 if own in CLOSING.values() else -1]
    return text[:first], text[last:]


def find_unaligned_accesses(program):
    """Finds the accesses through pointers that were cast. The address spaces must not be erased yet."""
    return _Finder(program).find()


class _Finder:
    def __init__(self, program):
        self._program = program
        self._tokens = program.tokens
        self._functions = [d for d in program.walk() if d.kind == "function" and d.body is not None]
        self._casts = {}  # index of a cast's first token -> index of its operand's first token
        self._operands = {}  # the same, the other way round
        self._type_ends = self._ends_of_types()
        self._names = set()  # (id of a function, or None for members; name) of pointers that were cast
        self._results = set()  # functions that return such pointers
        self._guards = Guards(program.tokens)

    def find(self):
        for function in self._functions:
            for i in range(*self._span(function)):
                end = self._cast_end(i)
                if end is not None:
                    self._casts[i], self._operands[end] = end, i
        if self._casts:
            self._follow()
            for function in self._functions:
                self._rewrite(function)
        return self._guards

    def _span(self, function):
        return function.parameters[0], function.body[1]

    # Casts ----------------------------------------------------------------------------------------------------------

    def _cast_end(self, i):
        """Returns the index after the cast to a pointer, or a reference, that begins at i."""
        tokens, partner = self._tokens, self._program.partner
        if tokens[i].text in _CASTS and tokens[i + 1].text == "<":
            close = matching_angle(tokens, i + 1)
            return close + 1 if close is not None and self._is_pointer(i + 2, close) else None
        if tokens[i].text != "(" or self._ends_operand(i - 1):
            return None
        close = partner[i]
        begins = tokens[close + 1].kind in ("id", "num") or tokens[close + 1].text in ("(", "&", "*")
        return close + 1 if begins and self._is_pointer(i + 1, close) else None

    def _is_pointer(self, first, last):
        for token in self._tokens[first:last]:
            if token.kind not in ("id", "num") and token.text not in ("*", "&", "::", "<", ">", ","):
                return False
        words = self._program.words_of_pointers(first, last)
        while words and words[-1] in ("const", "restrict", "__restrict", *_SPACES):
            words.pop()
        return bool(words) and words[-1] in ("*", "&") and bool(_SPACES & set(words))

    def _ends_operand(self, i):
        """Returns whether an operand ends with the token at i, so that the operator after it is no prefix."""
        token = self._tokens[i]
        if token.text == ")":
            return not self._is_cast_to_number(self._program.partner[i])
        if token.text in (">", ">>"):
            return i in self._type_ends
        return (
            token.kind in ("num", "str", "char")
            or token.text == "]"
            or (token.kind == "id" and token.text not in _KEYWORDS)
        )

    def _is_cast_to_number(self, i):
        words = self._tokens[i + 1 : self._program.partner[i]]
        return i in self._casts or len(words) == 1 and bool(_NUMBER.fullmatch(words[0].text))

    def _ends_of_types(self):
        """Returns the indices of the tokens that close template arguments."""
        tokens, found = self._tokens, set()
        for i, token in enumerate(tokens):
            if token.text == "<" and tokens[i - 1].kind == "id":
                close = matching_angle(tokens, i)
                if close is not None and all(
                    t.kind in ("id", "num") or t.text in _IN_TYPES for t in tokens[i + 1 : close]
                ):
                    found.add(close)
        return found

    # Which pointers ------------------------------------------------------------------------------------------------

    def _follow(self):
        owners = {function.owner for function in self._functions if function.in_class}
        members = {owner: {m.name for m in owner.members if m.kind == "variable"} for owner in owners}
        declared = {}
        for function in self._functions:
            declared.setdefault(function.name, []).append(function)
        known = None
        while known != (len(self._names), len(self._results)):
            known = len(self._names), len(self._results)
            for function in self._functions:
                self._follow_in(function, members.get(function.owner, ()), declared)

    def _follow_in(self, function, members, declared):
        tokens, partner = self._tokens, self._program.partner
        i, end = self._span(function)
        while i < end:
            text = tokens[i].text
            if text == "=" and self._is_cast_pointer(function, i + 1, self._expression_end(i + 1)):
                self._taint(function, self._assigned(i), members)
            elif text == "return" and self._is_cast_pointer(function, i + 1, self._expression_end(i + 1)):
                self._results.add(function.name)
            elif text in ("(", "{") and tokens[i - 1].kind == "id" and tokens[i - 1].text not in _KEYWORDS:
                called = declared.get(tokens[i - 1].text, ()) or declared.get(tokens[i - 2].text, ())
                for position, (first, last) in enumerate(self._program.split_parameters(i, partner[i])):
                    if self._is_cast_pointer(function, first, last):
                        self._taint_parameter(called, position)
                        if tokens[i - 1].text in members:  # this is a constructor's initializer
                            self._names.add((None, tokens[i - 1].text))
            i += 1

    def _is_cast_pointer(self, function, first, last):
        """Returns whether the value of an expression may be a pointer that was cast."""
        tokens, partner, i = self._tokens, self._program.partner, first
        while i < last:
            text = tokens[i].text
            if i > first and tokens[i - 1].text == "*" and not self._ends_operand(i - 2):  # what it points to
                i = self._operand_end(i)
                continue
            if i in self._casts:
                end = self._operand_end(i)
                return tokens[end].text not in (".", "->")
            if (
                text == "["
                or text == "("
                and (
                    tokens[i - 1].kind == "id"
                    and tokens[i - 1].text not in _KEYWORDS
                    or tokens[partner[i] + 1].text in ("[", ".", "->")
                )
            ):
                i = partner[i]
            elif tokens[i].kind == "id" and tokens[i + 1].text not in ("[", ".", "->"):
                if self._is_tainted(function, i):
                    return True
            i += 1
        return False

    def _is_tainted(self, function, i):
        name = self._tokens[i].text
        if self._tokens[i + 1].text == "(":
            return name in self._results
        if self._tokens[i - 1].text in (".", "->"):
            return (None, name) in self._names
        return (id(function), name) in self._names or function.in_class and (None, name) in self._names

    def _assigned(self, i):
        """Returns the index of the name that the `=` at i assigns to."""
        i -= 1
        while self._tokens[i].text == "]":
            i = self._program.partner[i] - 1
        return i

    def _taint(self, function, i, members):
        if self._tokens[i].kind == "id":
            name = self._tokens[i].text
            is_member = self._tokens[i - 1].text in (".", "->") or name in members
            self._names.add((None if is_member else id(function), name))

    def _taint_parameter(self, functions, position):
        for function in functions:
            parts = self._program.split_parameters(*function.parameters)
            if position < len(parts):
                name_at = self._program.declarator_name(*parts[position])
                if name_at is not None:
                    self._names.add((id(function), self._tokens[name_at].text))

    def _expression_end(self, i):
        tokens = self._tokens
        while tokens[i].text not in (";", ",", ")", "}", "]"):
            i = self._program.partner[i] + 1 if tokens[i].text in CLOSING else i + 1
        return i

    # Accesses ------------------------------------------------------------------------------------------------------

    def _rewrite(self, function):
        tokens, partner = self._tokens, self._program.partner
        for i in range(function.body[0] + 1, function.body[1]):
            if tokens[i].text == "[" and self._ends_operand(i - 1) and self._program.attribute_end(i) is None:
                first = self._postfix_start(i - 1)
                if self._is_tainted_base(function, first, i) and not self._is_declared(first):
                    kind = self._access(function, first, partner[i])
                    if kind:
                        self._guards.subscript(first, i, partner[i], kind)
            elif tokens[i].text == "->":
                first = self._postfix_start(i - 1)
                if self._is_tainted_base(function, first, i):
                    kind = self._access(function, first, i - 1)
                    if kind:
                        self._guards.member(first, i, kind)
            elif tokens[i].text == "*" and not self._ends_operand(i - 1):
                last = self._operand_end(i + 1) - 1
                if last > i and self._is_tainted_operand(function, i + 1, last + 1):
                    kind = self._access(function, i, last)
                    if kind:
                        self._guards.indirection(i, last, kind)

    def _postfix_start(self, i):
        """Returns the index of the first token of the postfix expression that ends at i."""
        tokens, partner = self._tokens, self._program.partner
        while True:
            while tokens[i].text in (")", "]"):
                i = partner[i]
                if tokens[self._operands.get(i, i)].text in _CASTS:
                    return self._operands[i]
                if tokens[i].text == "(" and not (tokens[i - 1].kind == "id" and tokens[i - 1].text not in _KEYWORDS):
                    return i
                i -= 1
            if tokens[i - 1].text not in (".", "->", "::"):
                return i
            i -= 2

    def _operand_end(self, i):
        """Returns the index after the unary expression that begins at i."""
        tokens, partner = self._tokens, self._program.partner
        while tokens[i].text in ("*", "&", "+", "-", "!", "~", "++", "--") or i in self._casts:
            i = self._casts.get(i, i + 1)
        if tokens[i].text == "(":
            i = partner[i] + 1
        elif tokens[i].kind == "id":
            i += 1
            if tokens[i].text == "<" and tokens[i - 1].text in _CASTS:
                i = self._program.angle_end(i)
        else:
            return i
        while True:
            if tokens[i].text in ("(", "["):
                i = partner[i] + 1
            elif tokens[i].text in (".", "->", "::"):
                i += 2
            elif tokens[i].text in ("++", "--"):
                i += 1
            else:
                return i

    def _is_tainted_base(self, function, first, end):
        """Returns whether the expression before a subscript is a pointer that was cast."""
        tokens, i = self._tokens, end - 1
        while tokens[i].text == "]":
            i = self._program.partner[i] - 1
        if tokens[i].text == ")":
            opening = self._program.partner[i]
            if tokens[self._operands.get(opening, opening)].text in _CASTS:
                return True
            if tokens[opening - 1].kind == "id" and tokens[opening - 1].text not in _KEYWORDS:
                return self._is_tainted(function, opening - 1)
            return self._is_cast_pointer(function, opening + 1, i)
        return self._is_tainted(function, i)

    def _is_tainted_operand(self, function, first, end):
        return (
            first in self._casts
            or self._is_cast_pointer(function, first, end)
            or (self._tokens[end - 1].text == "]" and self._is_tainted_base(function, first, end))
        )

    def _is_declared(self, i):
        """Returns whether the name at i, which a `[` follows, is the name of a declaration."""
        tokens, first = self._tokens, i
        while tokens[first - 1].kind == "id" or tokens[first - 1].text in ("*", "&", "::", "<", ">"):
            first -= 1
        words = tokens[first:i]
        spaced = any(token.text in _SPACES for token in words)
        starts = tokens[first - 1].text in (";", "{", "}") or spaced
        return bool(words) and starts and words[0].kind == "id" and words[0].text not in _KEYWORDS

    def _access(self, function, first, last):
        """Returns the function that an access becomes a call of; None where the program needs a reference to the memory
        itself."""
        tokens, partner = self._tokens, self._program.partner
        while tokens[first - 1].text == "(" and partner[first - 1] == last + 1 and not self._ends_operand(first - 2):
            first, last = first - 1, last + 1
        end = last + 1
        while tokens[end].text in (".", "->", "[") or tokens[end].text == "(" and end > last + 1:
            end = partner[end] + 1 if tokens[end].text in ("[", "(") else end + 2
        has_part, before, after = end > last + 1, tokens[first - 1].text, tokens[end].text
        if after in _ASSIGNMENTS or after in ("++", "--") or before in ("++", "--"):
            return "place" if has_part else "write"
        if (
            before == "&"
            and not self._ends_operand(first - 2)
            or before == "="
            and tokens[first - 3].text in ("&", "&&")
            or before == "return"
            and any(t.text == "&" for t in tokens[function.head : function.name_at])
            or before in ("(", ",")
            and after in (")", ",")
            and self._is_bound_to_reference(first)
        ):
            return None
        is_stored = before == "=" and tokens[first - 2].text in (")", "]") and after == ";"
        return "copy" if is_stored and not has_part else "read"

    def _is_bound_to_reference(self, first):
        """Returns whether the argument that begins at `first` is passed to a parameter that is a reference and not
        const."""
        tokens, opening, position = self._tokens, first - 1, 0
        while tokens[opening].text != "(":
            if tokens[opening].text in (")", "]", "}"):
                opening = self._program.partner[opening]
            elif tokens[opening].text in ("{", "[", ";"):
                return False
            position += tokens[opening].text == ","
            opening -= 1
        called = tokens[opening - 1].text
        if called in _UNEVALUATED:
            return True
        for function in self._functions:
            if function.name == called:
                parts = self._program.split_parameters(*function.parameters)
                if position < len(parts):
                    words = [token.text for token in tokens[slice(*parts[position])]]
                    if "&" in words and "const" not in words and "constant" not in words:
                        return True
        return False
