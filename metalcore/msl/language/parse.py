"""Finds the declarations of an MSL program: kernels, functions, types, variables, instantiations.

This is no C++ parser. It finds where a declaration begins and ends, its name and its parameters. Bodies and expressions
are left to the C++ compiler behind the translator.
"""

from ..errors import error_at
from .syntax import Syntax
from .tokens import CLOSING, matching_angle

_CLASS_KEYS = ("struct", "class", "union", "enum")
_ASSIGNABLE = ("=", ";", ",", "{")


class Declaration:
    """One declaration, tokens[first:last], with the parts that its kind has."""

    def __init__(self, kind, name, first, last, scope):
        self.kind = kind  # function, class, variable, alias or instantiation
        self.name = name
        self.first = first
        self.last = last
        self.scope = scope  # names of the enclosing namespaces and classes
        self.owner = None  # the class that it is a member of
        self.head = first  # first token after `template <…>`
        self.templates = []  # (index of <, index of >) of each template header
        self.name_at = None  # index of the name's first token
        self.parameters = None  # (index of the opening, of the closing) parenthesis
        self.body = None  # (index of {, of })
        self.members = []  # of a class
        self.attributes = {}  # name -> tokens of the argument

    @property
    def in_class(self):
        return self.owner is not None

    @property
    def qualified_name(self):
        return "::".join((*self.scope, self.name))

    @property
    def is_template(self):
        return bool(self.templates)


class ParsedProgram(Syntax):
    """The tokens of a program with its brackets paired and its declarations found."""

    def __init__(self, tokens):
        super().__init__(tokens)
        self.declarations = []
        self.integers = None  # named integer constants, found when first asked for
        self._aliases = None
        self._scope(0, len(tokens), (), None)

    def walk(self, declarations=None):
        """Yields every declaration, with the members of classes."""
        for declaration in self.declarations if declarations is None else declarations:
            yield declaration
            yield from self.walk(declaration.members)

    def aliases(self):
        """Returns {name: the words of its type} of every `using` and `typedef`, except those of arrays and functions.

        A name of a name has the words of the latter. If a name has several meanings, one that is a pointer counts.
        """
        if self._aliases is None:
            found = {}
            for declaration in self.walk():
                if declaration.kind == "alias":
                    for name, words in self._alias_types(declaration):
                        if name not in found or words[-1] in ("*", "&"):
                            found[name] = words
            self._aliases = {name: _resolved(name, found) for name in found}
        return self._aliases

    def words_of_pointers(self, first, last):
        """Returns the words of tokens[first:last], with those of the type for each name of a pointer or a reference."""
        words = []
        for token in self.tokens[first:last]:
            meaning = self.aliases().get(token.text, ())
            words += meaning if {"*", "&"} & set(meaning[-2:]) else [token.text]
        return words

    def _alias_types(self, declaration):
        """Yields (name, the words of its type) of each name that a `using` or a `typedef` declares."""
        tokens, first, end = self.tokens, declaration.head, declaration.last - 1
        if tokens[first].text == "using":
            words = [token.text for token in tokens[first:end]]
            if declaration.name and words[-1] != "=" and "=" in words:
                yield declaration.name, words[words.index("=") + 1 :]
        elif tokens[first].text == "typedef":
            specifiers = []
            for i, (start, last) in enumerate(self.split_parameters(first, end)):
                words = [token.text for token in tokens[start : last - 1]]
                if i == 0:
                    pointers = next((n for n, word in enumerate(reversed(words)) if word not in ("*", "&")), 0)
                    specifiers = words[: len(words) - pointers]
                else:
                    words = specifiers + words
                if words and tokens[last - 1].kind == "id":
                    yield tokens[last - 1].text, words

    def _scope(self, i, end, scope, owner):
        tokens = self.tokens
        while i < end:
            text = tokens[i].text
            if text == ";":
                i += 1
            elif owner and text in ("public", "private", "protected") and tokens[i + 1].text == ":":
                i += 2
            elif text == "namespace" or (text == "inline" and tokens[i + 1].text == "namespace"):
                i = self._namespace(i, end, scope)
            elif text == "extern" and tokens[i + 1].kind == "str":
                if tokens[i + 2].text == "{":
                    self._scope(i + 3, self.partner[i + 2], scope, owner)
                    i = self.partner[i + 2] + 1
                else:
                    i += 2
            else:
                i = self._declaration(i, end, scope, owner)

    def _namespace(self, i, end, scope):
        tokens, names = self.tokens, []
        while i < end and tokens[i].text not in ("{", ";", "="):
            attribute = self.attribute_end(i)
            if attribute is not None:
                i = attribute
                continue
            if tokens[i].kind == "id" and tokens[i].text not in ("namespace", "inline"):
                names.append(tokens[i].text)
            i += 1
        if i >= end:
            raise error_at(tokens[end - 1], "expected '{' after the namespace's name")
        if tokens[i].text != "{":
            return self._to_semicolon(i, end)
        self._scope(i + 1, self.partner[i], scope + tuple(names), None)
        return self.partner[i] + 1

    def _to_semicolon(self, i, end):
        """Returns the index after the `;` that ends the statement around the token at i."""
        while i < end:
            text = self.tokens[i].text
            if text == ";":
                return i + 1
            i = self.partner[i] + 1 if text in CLOSING else i + 1
        raise error_at(self.tokens[end - 1], "expected ';'")

    def _add(self, declaration, owner):
        declaration.owner = owner
        (owner.members if owner else self.declarations).append(declaration)
        return declaration.last

    def _declaration(self, first, end, scope, owner):
        tokens, i = self.tokens, first
        declaration = Declaration("variable", "", first, first, scope)
        if tokens[i].text == "extern" and tokens[i + 1].text == "template":
            i += 1
        while tokens[i].text == "template":
            if tokens[i + 1].text != "<":
                declaration.kind, declaration.head = "instantiation", i + 1
                declaration.last = self._to_semicolon(i, end)
                self._instantiation(declaration)
                return self._add(declaration, owner)
            close = matching_angle(tokens, i + 1, end)
            if close is None:
                raise error_at(tokens[i], "expected '>' at the end of the template's parameters")
            declaration.templates.append((i + 1, close))
            i = close + 1
        declaration.head = i
        text = tokens[i].text if i < end else ""
        if text in ("using", "static_assert", "typedef"):
            if text == "typedef":
                body = self._class_body(i + 1, end)
                if body is not None:
                    return self._class(declaration, i + 1, body, end, owner)
            declaration.kind = "alias"
            declaration.last = self._to_semicolon(i, end)
            declaration.name = self._alias_name(i, declaration.last)
            return self._add(declaration, owner)
        j = i
        while j < end and (tokens[j].kind == "id" or self.attribute_end(j) is not None):
            if tokens[j].text in _CLASS_KEYS:
                body = self._class_body(j, end)
                if body is not None:
                    return self._class(declaration, j, body, end, owner)
            j = self.attribute_end(j) or (self.partner[j + 1] + 1 if self._grouped(j) else j + 1)
        return self._function_or_variable(declaration, i, end, owner)

    def _alias_name(self, i, last):
        tokens = self.tokens
        if tokens[i].text == "using":
            return tokens[i + 1].text if tokens[i + 2].text in ("=", "[") else ""
        names = [token.text for token in tokens[i:last] if token.kind == "id"]
        return names[-1] if tokens[i].text == "typedef" else ""

    def _class_body(self, i, end):
        """Returns the index of the `{` of the class defined by the `struct` (or the like) at i, or None if none is."""
        tokens = self.tokens
        if i >= end or tokens[i].text not in _CLASS_KEYS:
            return None
        i += 1
        while i < end:
            text = tokens[i].text
            if text == "{":
                return i
            if text == ":":
                while i < end and tokens[i].text not in ("{", ";"):
                    i = self.partner[i] + 1 if tokens[i].text == "(" else i + 1
                return i if i < end and tokens[i].text == "{" else None
            if self._grouped(i):
                i = self.partner[i + 1] + 1
            elif (after := self.attribute_end(i)) is not None:
                i = after
            elif text == "<":
                close = matching_angle(tokens, i, end)
                if close is None:
                    return None
                i = close + 1
            elif tokens[i].kind == "id" or text == "::":
                i += 1
            else:
                return None
        return None

    def _class(self, declaration, key, body, end, owner):
        tokens = self.tokens
        declaration.kind = "class"
        declaration.body = (body, self.partner[body])
        i = key + 1
        while i < body and tokens[i].text != ":":
            if self._grouped(i):
                i = self.partner[i + 1] + 1
            elif (after := self.attribute_end(i)) is not None:
                i = after
            else:
                if tokens[i].kind == "id" and tokens[i].text not in ("class", "struct", "final"):
                    declaration.name, declaration.name_at = tokens[i].text, i
                i = self.angle_end(i, body) if tokens[i].text == "<" else i + 1
        declaration.last = self._to_semicolon(self.partner[body], end)
        if not declaration.name:  # typedef struct { … } Name;
            names = [token.text for token in tokens[self.partner[body] : declaration.last] if token.kind == "id"]
            declaration.name = names[0] if names else ""
        if tokens[key].text != "enum":
            self._scope(body + 1, self.partner[body], (*declaration.scope, declaration.name), declaration)
        return self._add(declaration, owner)

    def _function_or_variable(self, declaration, i, end, owner):
        tokens, start = self.tokens, i
        while i < end:
            text, attribute = tokens[i].text, self.attribute_end(i)
            if attribute is not None:
                i = attribute
            elif text == "operator":
                declaration.name_at = i
                i = self._operator(declaration, i, end)
                return self._function(declaration, i, end, owner)
            elif self._grouped(i):
                i = self.partner[i + 1] + 1
            elif text == "<" and i > start and tokens[i - 1].kind == "id":
                i = self.angle_end(i, end)
            elif text == "(":
                name_at = self._name_before(i, start)
                inside = tokens[i + 1].text
                if name_at is not None and not (
                    inside in ("*", "&") and tokens[i + 2].kind == "id" and self.partner[i] == i + 3
                ):
                    declaration.name, declaration.name_at = tokens[name_at].text, name_at
                    return self._function(declaration, i, end, owner)
                i = self.partner[i] + 1
            elif text in _ASSIGNABLE or text == ":":
                break
            elif text == "[":
                i = self.partner[i] + 1
            elif text in ("}", ")", "]"):
                raise error_at(tokens[i], f"unexpected '{text}'")
            else:
                if tokens[i].kind == "id":
                    declaration.name, declaration.name_at = text, i
                i += 1
        declaration.last = self._to_semicolon(i, end)
        declaration.attributes = self.read_attributes(declaration.head, i + 1 if i < end else i)
        return self._add(declaration, owner)

    def _name_before(self, i, start):
        """Returns the index of the function's name that the parenthesis at i follows, or None."""
        i -= 1
        if i >= start and self.tokens[i].text == ">":
            depth = 0
            while i >= start:
                depth += {">": 1, ">>": 2, "<": -1}.get(self.tokens[i].text, 0)
                i -= 1
                if depth == 0:
                    break
        return i if i >= start and self.tokens[i].kind == "id" else None

    def _operator(self, declaration, i, end):
        """Names an operator function; returns the index of the parenthesis before its parameters."""
        tokens, j = self.tokens, i + 1
        if tokens[j].text == "(" and tokens[j + 1].text == ")":
            j += 2
        else:
            while j < end and tokens[j].text != "(":
                j += 1
        if j >= end:
            raise error_at(tokens[i], "expected '(' after the operator's name")
        declaration.name = "operator" + "".join(token.text for token in tokens[i + 1 : j])
        if tokens[j].text == "<":  # operator()<half>(half x)
            close = matching_angle(tokens, j, end)
            j = j if close is None else close + 1
        return j

    def _function(self, declaration, i, end, owner):
        tokens = self.tokens
        declaration.kind = "function"
        declaration.parameters = (i, self.partner[i])
        declaration.attributes = self.read_attributes(declaration.head, i)
        j, initializers = self.partner[i] + 1, False
        while j < end:
            text = tokens[j].text
            if text == ";":
                declaration.last = j + 1
                return self._add(declaration, owner)
            if text == "{" and not (initializers and tokens[j - 1].text not in (")", "}", ":")):
                declaration.body = (j, self.partner[j])
                declaration.last = self.partner[j] + 1
                return self._add(declaration, owner)
            if text == ":":
                initializers = True
            attribute = self.attribute_end(j)
            if attribute is not None:
                declaration.attributes.update(self.read_attributes(j, attribute))
            j = attribute or (self.partner[j] + 1 if text in CLOSING else j + 1)
        raise error_at(tokens[end - 1], f"expected a body or ';' after the declaration of '{declaration.name}'")

    def _instantiation(self, declaration):
        tokens, i, end = self.tokens, declaration.head, declaration.last - 1
        declaration.attributes = self.read_attributes(i, end)
        # The name with its arguments stands before the parameters, or last: `decltype(f<…>) f<…>;`.
        while i < end:
            if (after := self.attribute_end(i)) is not None:
                i = after
            elif self._grouped(i):
                i = self.partner[i + 1] + 1
            elif tokens[i].text == "(":
                declaration.parameters = (i, self.partner[i])
                break
            elif tokens[i].text == "void":  # a name behind it may begin with ::
                i += 1
            elif tokens[i].kind == "id" and tokens[i + 1].text in ("<", "::", "(", ";"):
                declaration.name_at = i
                declaration.name = tokens[i].text
                while tokens[i + 1].text == "::":
                    i += 2
                    declaration.name = tokens[i].text
                i += 1
                if tokens[i].text == "<":
                    i = self.angle_end(i, end)
                declaration.name_end = i
            else:
                i += 1


def _resolved(name, aliases):
    """Returns the words of the type that a name stands for, through names of names."""
    words, seen, qualifiers = aliases[name], {name}, []
    while len(plain := [word for word in words if word not in ("const", "volatile")]) == 1:
        if plain[0] not in aliases or plain[0] in seen:
            break
        seen.add(plain[0])
        qualifiers += [word for word in words if word not in plain]
        words = aliases[plain[0]]
    return words + qualifiers
