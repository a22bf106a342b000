"""What each address space of a program belongs to. An address space that belongs to nothing known is an error.

In C++ a pointer has the same type wherever it points, so the address space of what it points to may be erased, as may
`thread` and `constant` of an object. An object in `threadgroup` memory differs from one without the word: it is a
variable that the threadgroup shares, or the name of a type of such variables.
"""

from dataclasses import dataclass, field

from ..errors import error_at
from .declarators import SPACES, DeclarationReader
from .tokens import matching_angle

_REFUSED = {"threadgroup_imageblock", "ray_data", "object_data"}
_OBJECT_WHERE = {"device": "in device memory", "threadgroup": "in threadgroup memory"}
_MEASURES = ("sizeof", "alignof", "_Alignof", "decltype")


@dataclass
class AddressSpaces:
    claimed: set = field(default_factory=set)  # indices of the words that are understood
    statements: list = field(default_factory=list)  # (declaration, [whether each declarator is a threadgroup variable])


def find_address_spaces(program):
    """AddressSpaces of a program.

    Raises:
        MSLError: an address space stands where it means nothing, or where it is not understood.
    """
    return _Finder(program).find()


class _Finder:
    def __init__(self, program):
        self.program = program
        self.tokens = program.tokens
        self.reader = DeclarationReader(program)
        self.found = AddressSpaces()
        # name of a type in an address space -> [(first, last, whether it is a class's, space)], by where it is visible
        self.aliases = {}
        self.bodies = [d.body for d in program.walk() if d.kind == "function" and d.body]

    def find(self):
        tokens, read, attribute = self.tokens, -1, 0
        for i, token in enumerate(tokens):
            attribute = max(attribute, self.program.attribute_end(i) or 0)
            if i < attribute:
                continue  # [[threadgroup(0)]]
            if token.text in SPACES and token.kind == "id":
                if i not in self.found.claimed:
                    self._space(i)
            elif token.text in self.aliases and self._is_alias(i) and i > read:
                read = self._alias_use(i)
        return self.found

    def _error(self, i, message):
        return error_at(self.tokens[i], message)

    # A word ---------------------------------------------------------------------------------------------------------

    def _space(self, i):
        tokens, claimed = self.tokens, self.found.claimed
        if tokens[i].text in _REFUSED:
            raise self._error(i, f"'{tokens[i].text}' is not supported")
        if tokens[i - 1].text == "(" and tokens[i - 2].text == "coherent":
            claimed.add(i)
            return
        first = self.reader.start(i)
        declaration = self.reader.read(first)
        if declaration.type is None:
            if not self._qualifies_method(first, declaration):
                raise self._error(i, f"it is not understood what '{tokens[i].text}' belongs to")
            claimed.update(declaration.spaces)
            return
        spaces = {*declaration.spaces, *(s for d in declaration.declarators for s in d.spaces)}
        if i not in spaces:
            raise self._error(i, f"it is not understood what '{tokens[i].text}' belongs to")
        claimed.update(spaces)
        if tokens[i].text == "threadgroup" and self.reader.is_template_argument(first):
            self._argument_of_trait(first)
        self._declaration(i, declaration, declaration.spaces)

    def _qualifies_method(self, first, declaration):
        """Returns whether the word at i stands after a method's parameters."""
        return self.tokens[first - 1].text == ")" and not declaration.storage

    def _alias_use(self, i):
        """Judges a use of the name of a type in an address space. Returns the last token that was read."""
        first = self.reader.start(i)
        declaration = self.reader.read(first)
        if declaration.type is None or not declaration.type[0] <= i < declaration.type[1]:
            raise self._error(i, f"it is not understood what '{self.tokens[i].text}', in an address space, is for")
        self._declaration(i, declaration, [*declaration.spaces, i])
        self.found.claimed.update(s for d in declaration.declarators for s in d.spaces)
        return declaration.declarators[-1].end if declaration.declarators else i

    def _is_alias(self, i):
        declared = any(first == i for first, *_ in self.aliases[self.tokens[i].text])
        return not declared and self.tokens[i - 1].text not in (".", "->") and self._space_of(i) is not None

    def _space_of(self, i):
        """Returns the address space that the token at i is, or that the type it names is in."""
        if self.tokens[i].text in SPACES:
            return self.tokens[i].text
        meanings = self.aliases[self.tokens[i].text]
        if self.tokens[i - 1].text == "::":  # a class's or a namespace's
            spaces = {space for *_, space in meanings}
            if len(spaces) > 1:
                raise self._error(i, f"which '{self.tokens[i].text}' is meant here is not understood")
            return spaces.pop()
        return next((space for first, last, _, space in reversed(meanings) if first < i < last), None)

    # What is declared -----------------------------------------------------------------------------------------------

    def _declaration(self, i, declaration, spaces):
        """Judges a declaration. `spaces` are the indices of the address spaces of its type."""
        shared = []
        for declarator in declaration.declarators:
            objects = self._object_spaces(declarator, spaces)
            name = declarator.name if declarator.name is not None else i
            shared.append("threadgroup" in objects)
            if len(objects) > 1:
                words = "' and '".join(sorted(map(str, objects)))
                raise self._error(name, f"'{self.tokens[name].text}' is in two address spaces, '{words}'")
            for space in objects & _OBJECT_WHERE.keys():
                self._object(i, declaration, declarator, space)
        if any(shared) and self._is_statement(declaration):
            self.found.statements.append((declaration, shared))

    def _object_spaces(self, declarator, spaces):
        """Returns the address spaces that the declared object itself lies in."""
        among = [
            *(spaces if not declarator.pointers else ()),
            *(s for s in declarator.spaces if all(pointer < s for pointer in declarator.pointers)),
        ]
        return {self._space_of(s) for s in among}

    def _object(self, i, declaration, declarator, space):
        """Judges an object in device or threadgroup memory, which may be declared in some places only."""
        words, tokens = declaration.words(self.tokens), self.tokens
        before = tokens[declaration.first - 1].text if declaration.first else ""
        name = tokens[declarator.name].text if declarator.name is not None else ""
        if "typedef" in words or before == "=" and tokens[declaration.first - 3].text == "using":
            self._name_alias(declarator.name if "typedef" in words else declaration.first - 2, space)
            return
        where = self.reader.enclosing[declaration.first]
        if self.reader.is_template_argument(declaration.first):
            self._template_argument(i, declaration.first)
        elif where is not None and tokens[where].text == "(":
            is_parameter = declarator.is_array and tokens[where - 1].text not in ("for", "if", "while", "switch")
            if not is_parameter and tokens[where - 1].text not in _MEASURES:
                what = f"'{name}'" if name else "the type here"
                raise self._error(
                    i,
                    f"{what} is itself {_OBJECT_WHERE[space]}, and can be neither passed, converted "
                    "to nor declared here; point to it instead",
                )
        elif declarator.is_function:
            raise self._error(
                i,
                f"'{name}' cannot be a function whose result is {_OBJECT_WHERE[space]}, nor can a "
                "variable there be initialized by parentheses",
            )
        elif space == "device":
            raise self._error(i, f"a variable ('{name}') cannot be in device memory")
        elif not self._is_statement(declaration):
            raise self._error(i, f"a threadgroup variable ('{name}') must be declared in a block of a function")
        elif declarator.name is None:
            raise self._error(i, "a threadgroup variable must have a name")
        elif tokens[declaration.type[0]].text == "auto":
            raise self._error(i, f"the type of a threadgroup variable ('{name}') must be written")

    def _name_alias(self, i, space):
        """Notes the name of a type in an address space, and where the name has this meaning."""
        name = self.tokens[i].text
        if name not in self.aliases:  # the program may give the name other meanings too
            others = [(j, *self._visible(j), None) for j in self._other_meanings(name) if j != i]
            shadows = [
                (declaration.first, declaration.last, False, None)
                for declaration in self.program.walk()
                for opening, closing in declaration.templates
                if any(token.text == name for token in self.tokens[opening:closing])
            ]
            self.aliases[name] = others + shadows
        known = [meaning for meaning in self.aliases[name] if meaning[0] != i]
        self.aliases[name] = sorted([*known, (i, *self._visible(i), space)], key=lambda meaning: meaning[0])

    def _visible(self, i):
        """Returns (index up to which the name declared at i is visible, whether it is a member of a class)."""
        enclosing = self.reader.enclosing[i]
        if enclosing is None or self.tokens[enclosing].text != "{":
            return len(self.tokens), False
        last = self.program.partner[enclosing]
        if last in self.reader.classes:
            return last, True
        return (last, False) if self._in_body(i) else (len(self.tokens), False)

    def _other_meanings(self, name):
        """Returns where the program declares types of this name."""
        tokens = self.tokens
        for i, token in enumerate(tokens):
            if token.text == name and token.kind == "id":
                if (
                    tokens[i - 1].text in ("using", "struct", "class", "union", "enum")
                    and tokens[i + 1].text in "={:"
                    or tokens[i + 1].text in (";", ",", "[", ")")
                    and "typedef" in self.reader.read(self.reader.start(i)).words(tokens)
                ):
                    yield i

    def _template_argument(self, i, first):
        """Refuses a type in an address space as an argument of a kernel's template: a variable of that type would lie
        there, and nothing would tell. The elements of a tensor are elsewhere."""
        if self.tokens[first - 1].text == "<" and self.tokens[first - 2].text == "tensor":
            return
        for declaration in self.program.declarations:
            if declaration.kind == "instantiation" and declaration.first <= i < declaration.last:
                raise self._error(i, f"a kernel template's argument cannot be a type in '{self.tokens[i].text}' memory")

    def _argument_of_trait(self, first):
        """Refuses `remove_pointer_t<threadgroup T*> b[16]`, which is in threadgroup memory in a way that is not
        followed."""
        tokens, i = self.tokens, first
        while tokens[i].text != "<" or tokens[i - 1].kind != "id" or (matching_angle(tokens, i) or 0) < first:
            i -= 1
        declaration = self.reader.read(self.reader.start(i - 1))
        if declaration.type is None or not declaration.type[0] < i < declaration.type[1]:
            return
        trait, is_pointer = tokens[i - 1].text, bool(self.reader.read(first).declarators[0].pointers)
        chooses = is_pointer and trait.startswith(("conditional", "enable_if"))
        makes_type = trait.endswith("_t") or tokens[declaration.type[1] - 1].text == "type"
        if not makes_type or chooses or trait == "remove_addrspace_t":
            return
        if self.reader.is_template_argument(declaration.first):
            return
        where = self.reader.enclosing[declaration.first]
        in_block = where is None or tokens[where].text == "{"
        if in_block and any(not d.pointers and not d.is_function for d in declaration.declarators):
            raise self._error(
                first, "whether this type is in threadgroup memory itself is not understood; write it out"
            )

    # Places ---------------------------------------------------------------------------------------------------------

    def _in_body(self, i):
        return any(first < i < last for first, last in self.bodies)

    def _is_statement(self, declaration):
        """Returns whether it declares variables of a block in a function."""
        tokens, first = self.tokens, declaration.first
        enclosing = self.reader.enclosing[first]
        if enclosing is None or tokens[enclosing].text != "{" or not self._in_body(first):
            return False
        if self.program.partner[enclosing] in self.reader.classes or "typedef" in declaration.words(tokens):
            return False
        before = tokens[first - 1].text
        if before == ")" and tokens[self.program.partner[first - 1] - 1].text in ("if", "while", "for", "switch"):
            return False
        return before in (";", "{", "}", ":", ")", "]", "MSL_UNROLL")
