"""Declarations read from the inside: the specifiers and the declarators that the tokens around an index belong to.

Bodies of functions are not parsed. Where a body names an address space, the declaration, cast or type around it is read
here by itself.
"""

from dataclasses import dataclass, field

from .tokens import CLOSING, matching_angle

SPACES = {"device", "constant", "thread", "threadgroup", "threadgroup_imageblock", "ray_data", "object_data"}
STORAGE = {
    "static", "constexpr", "inline", "extern", "register", "mutable", "thread_local", "typedef", "friend", "virtual",
    "kernel", "vertex", "fragment", "METAL_FUNC", "METAL_CONST", "METAL_PURE", "METAL_NOINLINE", "__inline__",
    "__inline", "explicit", "__extension__",
}  # fmt: skip
_QUALIFIERS = {"const", "volatile", "restrict", "__restrict", "__restrict__", "coherent", "_Nonnull", "_Nullable"}
_BUILTIN_TYPES = {"unsigned", "signed", "int", "char", "short", "long"}
_TYPE_KEYS = {"struct", "class", "union", "enum", "typename"}
_TYPE_OPERATORS = {"decltype", "typeof", "__typeof__", "__typeof"}
POINTERS = {"*", "&", "&&"}
# Words that end the search for a declaration's start.
_BEFORE_DECLARATIONS = {
    "return", "else", "do", "case", "default", "operator", "new", "delete", "using", "throw", "goto", "public",
    "private", "protected", "MSL_UNROLL", "template", "co_return",
}  # fmt: skip


@dataclass
class Declarator:
    """What one declarator of a declaration declares, as indices of tokens."""

    first: int
    name: int | None = None  # None for a type by itself
    last: int = 0  # after it, before its initializer
    pointers: list = field(default_factory=list)  # *, & and && before the name
    spaces: list = field(default_factory=list)  # address spaces among them
    alignments: list = field(default_factory=list)  # (first, last) of each attribute that aligns it
    is_array: bool = False
    is_function: bool = False
    initializer: tuple | None = None  # (first, last) with its = or braces
    end: int = 0  # the token after all of it: a comma, a semicolon, a closing bracket …

    def qualifies(self, space):
        """Returns whether the declared object lies in an address space of the specifiers (or of `spaces`): no pointer
        stands between them."""
        return all(pointer < space for pointer in self.pointers)


@dataclass
class Declaration:
    """A declaration, or a type by itself, somewhere in a program."""

    first: int
    type: tuple | None = None  # (first, last) of the type's tokens; None where there is none
    key: int | None = None  # index of `struct` or the like, where it defines a class
    storage: list = field(default_factory=list)
    spaces: list = field(default_factory=list)  # address spaces among the specifiers
    alignments: list = field(default_factory=list)
    declarators: list = field(default_factory=list)

    def words(self, tokens):
        return {tokens[i].text for i in self.storage}


class DeclarationReader:
    """Reads the declarations of a program around given tokens."""

    def __init__(self, program):
        self.program = program
        self.tokens = program.tokens
        self.classes = {}  # index of the closing brace of a class -> index of its keyword
        self.enclosing = []  # index of the innermost bracket around each token, or None
        opened = []
        for i, token in enumerate(self.tokens):
            if token.kind == "op" and token.text in (")", "]", "}"):
                opened.pop()
            self.enclosing.append(opened[-1] if opened else None)
            if token.kind == "op" and token.text in CLOSING:
                opened.append(i)
            if token.text in ("struct", "class", "union", "enum"):
                body = program._class_body(i, len(self.tokens))
                if body is not None and program.partner[body] is not None:
                    self.classes.setdefault(program.partner[body], i)

    # Where a declaration begins -------------------------------------------------------------------------------------

    def start(self, i):
        """Returns the index of the first token of the declaration around the token at i."""
        tokens, partner = self.tokens, self.program.partner
        while i > 0:
            text, kind = tokens[i - 1].text, tokens[i - 1].kind
            if kind == "id" and text not in _BEFORE_DECLARATIONS or text in ("::", *POINTERS):
                i -= 1
            elif text in (">", ">>"):
                opening = self._angle_before(i - 1)
                if opening is None or tokens[opening - 1].text == "template":
                    return i
                i = opening
            elif text == "]" and self.program.attribute_end(partner[i - 1]) == i:
                i = partner[i - 1]
            elif text == ")" and self.program._grouped(partner[i - 1] - 1):
                i = partner[i - 1] - 1
            elif text == "}" and i - 1 in self.classes:
                i = self.classes[i - 1]
            elif text == "(" and tokens[i].text in POINTERS:
                i -= 1
            else:
                return i
        return i

    def _angle_before(self, i):
        """Returns the index of the `<` whose list the `>` (or the last half of `>>`) at i closes."""
        tokens, j = self.tokens, i
        while j > 0 and tokens[j].text not in (";", "{", "}"):
            j -= 1
            if tokens[j].text in (")", "]"):
                j = self.program.partner[j]
            elif tokens[j].text in ("(", "["):
                return None
            elif tokens[j].text == "<" and tokens[j - 1].kind == "id":
                if matching_angle(self.tokens, j) == i and not self._is_inner(j, i):
                    return j
        return None

    def _is_inner(self, opening, closing):
        """Returns whether the list from `opening` ends in the first half of a `>>` at `closing`, which closes an outer
        one."""
        if self.tokens[closing].text != ">>":
            return False
        depth = 0
        for i in range(opening, closing):
            depth += {"<": 1, ">": -1}.get(self.tokens[i].text, 0)
        return depth < 2

    # Reading it -----------------------------------------------------------------------------------------------------

    def read(self, first):
        """Returns the Declaration that begins at `first`."""
        tokens, program = self.tokens, self.program
        declaration, i = Declaration(first), first
        while i < len(tokens):
            text = tokens[i].text
            attribute = program.attribute_end(i)
            if attribute is not None:
                i = attribute
            elif text in _TYPE_OPERATORS and program._grouped(i):
                if declaration.type:
                    break
                declaration.type = (i, program.partner[i + 1] + 1)
                i = declaration.type[1]
            elif program._grouped(i):
                end = program.partner[i + 1] + 1
                if self._aligns(i, end):
                    declaration.alignments.append((i, end))
                i = end
            elif text in SPACES:
                declaration.spaces.append(i)
                i += 1
            elif text in STORAGE:
                declaration.storage.append(i)
                i += 1
            elif text in _QUALIFIERS:
                i += 1
            elif text in _BUILTIN_TYPES:
                declaration.type = ((declaration.type or (i,))[0], i + 1)
                i += 1
            elif declaration.type is None and (tokens[i].kind == "id" and text != "operator" or text == "::"):
                if text in ("struct", "class", "union", "enum"):
                    declaration.key = i
                declaration.type = (i, self._type_end(i))
                i = declaration.type[1]
            else:
                break
        if declaration.type is None:
            return declaration
        enclosing = self.enclosing[first]
        alone = enclosing is not None and tokens[enclosing].text != "{" or self.is_template_argument(first)
        while i < len(tokens):
            declaration.declarators.append(self._declarator(i))
            i = declaration.declarators[-1].end
            if alone or i >= len(tokens) or tokens[i].text != ",":
                break
            i += 1
        return declaration

    def is_template_argument(self, first):
        """Returns whether the type at `first` stands in the list of a template's parameters or arguments."""
        tokens, i = self.tokens, first - 1
        if i >= 0 and tokens[i].text not in ("<", ","):
            return False
        while i >= 0 and tokens[i].text not in (";", "{", "(", "["):
            if tokens[i].text == "}" and i not in self.classes:
                return False
            if tokens[i].text in (")", "]", "}"):
                i = self.program.partner[i]
            elif tokens[i].text == "<" and tokens[i - 1].kind == "id":
                close = matching_angle(tokens, i)
                if close is not None and close >= first:
                    return True
            i -= 1
        return False

    def _aligns(self, first, last):
        words = [token.text for token in self.tokens[first:last]]
        return words[0] == "alignas" or "aligned" in words or "__aligned__" in words

    def _type_end(self, i):
        """Returns the index after the type that begins at i, where that is no keyword."""
        tokens, program = self.tokens, self.program
        if tokens[i].text in _TYPE_KEYS:
            is_class = tokens[i].text != "typename"
            body = program._class_body(i, len(tokens)) if is_class else None
            if body is not None:
                return program.partner[body] + 1
            i += 1
            while program._grouped(i) or program.attribute_end(i) is not None:
                i = program.attribute_end(i) or program.partner[i + 1] + 1
        while True:
            if tokens[i].text == "::":
                i += 1
            if tokens[i].text == "template":
                i += 1
            if tokens[i].kind != "id":
                return i
            i += 1
            if tokens[i].text == "<":
                close = matching_angle(tokens, i)
                if close is None:
                    return i
                i = close + 1
            if tokens[i].text != "::":
                return i

    def _declarator(self, first):
        tokens, program = self.tokens, self.program
        declarator, i, nesting = Declarator(first), first, []
        while i < len(tokens):
            text = tokens[i].text
            attribute = program.attribute_end(i)
            if attribute is not None:
                i = attribute
            elif program._grouped(i):
                end = program.partner[i + 1] + 1
                if self._aligns(i, end):
                    declarator.alignments.append((i, end))
                i = end
            elif text in POINTERS and declarator.name is None:
                declarator.pointers.append(i)
                i += 1
            elif text in SPACES:
                declarator.spaces.append(i)
                i += 1
            elif text in _QUALIFIERS or text == "...":
                i += 1
            elif text == "(" and declarator.name is None and self._opens_declarator(i):
                nesting.append(program.partner[i])
                i += 1
            elif nesting and i == nesting[-1]:
                nesting.pop()
                i += 1
            elif text == "(" and (nesting or not declarator.pointers or tokens[i - 1].text == ")"):
                declarator.is_function = True
                i = program.partner[i] + 1
                break
            elif text == "[":
                declarator.is_array = True
                i = program.partner[i] + 1
            elif tokens[i].kind == "id" and declarator.name is None and text not in _BEFORE_DECLARATIONS:
                declarator.name = i
                i += 1
            else:
                break
        declarator.last = declarator.end = i
        if i < len(tokens) and (tokens[i].text == "=" or declarator.name is not None and tokens[i].text in ("{", "(")):
            assigned = tokens[i].text == "="
            while i < len(tokens) and tokens[i].text not in (",", ";", ")", "}", "]", ">"):
                i = self._past(i)
                if tokens[i - 1].text == "}" and not assigned:
                    break  # the body of a function, after which a declaration may follow
            if not declarator.is_function:
                declarator.initializer = (declarator.last, i)
            declarator.end = i
        return declarator

    def _past(self, i):
        tokens = self.tokens
        if tokens[i].text in CLOSING:
            return self.program.partner[i] + 1
        if tokens[i].text == "<" and tokens[i - 1].kind == "id":
            return (matching_angle(tokens, i) or i) + 1
        return i + 1

    def _opens_declarator(self, i):
        """Returns whether the parenthesis at i holds a declarator: `(*p)`, `(&a)`, `(b)`, not parameters or
        arguments."""
        tokens, closing = self.tokens, self.program.partner[i]
        following = tokens[i + 1].text
        if following in POINTERS or following in SPACES and tokens[i + 2].text in POINTERS:
            return True
        if following == "(":
            return self._opens_declarator(i + 1)
        return (
            tokens[i + 1].kind == "id"
            and (closing == i + 2 or tokens[i + 2].text == "[")
            and (tokens[closing + 1].text in ("[", ",", ";", "=", "{", ")", ":") or self.program._grouped(closing + 1))
        )
