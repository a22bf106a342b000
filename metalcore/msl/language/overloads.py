"""Functions that differ in address spaces only. A call chooses between them as it runs, by where its pointers point.

In C++ such functions are the same one. Where their bodies are the same (`constant` is `const` there, which does not
count), one of them stays, or both where C++ tells them by a `const`. Otherwise each gets a new name, and a function of
the old name finds where its arguments (and a method's object) lie, and calls the function for that place. In a program
that Metal accepts this is the function that the types choose. An address does not tell `device` from `constant`, so
functions that differ in these two alone are refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import error_at
from .declarators import SPACES, DeclarationReader
from .duplicates import declaration_key, signature_words, template_names
from .rewrite import erase

# Places that an address tells apart: values of msl::Space.
_PLACES = {"device": "memory", "constant": "memory", "threadgroup": "threadgroup", "thread": "thread", None: None}
# Integers. Calls convert them, so a function that stands for several takes the widest.
_WHOLE = {"char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "size_t", "bool", "unsigned",
          "int8_t", "uint8_t", "int16_t", "uint16_t", "int32_t", "uint32_t", "int64_t", "uint64_t"}  # fmt: skip


@dataclass
class Parameter:
    first: int
    last: int
    name: int | None  # index
    spaces: list  # the address space that each of its pointers points into, outermost first; None where none is named
    is_pointer: bool  # its outermost pointer is a pointer, not a reference
    default: int | None  # index of its default's =


@dataclass
class Function:
    declaration: object
    parameters: list
    space_maps: list = field(default_factory=list)  # its {(position, depth): space}, and those of equal functions
    types: Sequence = ()  # the words of each parameter's type without spaces
    header: tuple = ()  # the words of its templates' parameters, without their names
    result: Sequence = ()  # the words before its name
    key: tuple | None = None
    qualifiers: str = ""  # the words after its parameters
    body: tuple = ()

    @property
    def does(self):
        """The words of its body, by which functions do the same or not."""
        return tuple(word for word in self.body if word != "const")

    @property
    def least(self):
        """The least number of arguments that a call needs."""
        return sum(parameter.default is None for parameter in self.parameters)


class Overloads:
    """The functions of a program that differ in address spaces. It must be made before the address spaces are
    erased."""

    def __init__(self, program):
        self.program = program
        self.functions, self.groups = [], []
        reader = DeclarationReader(program)
        for declaration in program.walk():
            if declaration.kind == "function":
                function = Function(declaration, _parameters(program, reader, declaration))
                function.space_maps.append(_space_map(program, function))
                self.functions.append(function)

    def merge(self):
        """Drops functions that are the same as an earlier one, and finds those between which calls must choose. It must
        be called after the address spaces are erased.

        Raises:
            MSLError: functions differ in a way that no address tells.
        """
        tokens, sets = self.program.tokens, {}
        for function in self.functions:
            declaration = function.declaration
            if not any(token.text for token in tokens[declaration.first : declaration.last]):
                continue
            self._describe(function)
            scope = (declaration.scope, id(declaration.owner), declaration.name)
            sets.setdefault(scope, []).append(function)
        for functions in sets.values():
            self._merge_set(self._without_duplicates(functions))

    def _describe(self, function):
        program, declaration = self.program, function.declaration
        tokens, names = program.tokens, template_names(program, declaration)
        function.key = declaration_key(program, declaration)
        function.types, function.header = signature_words(program, declaration)
        function.result = [t.text for t in tokens[declaration.head : declaration.name_at] if t.text]
        names |= {tokens[p.name].text: f"%{i}" for i, p in enumerate(function.parameters) if p.name is not None}
        if declaration.body:
            end = _head_end(program, declaration)
            words = (token.text for token in tokens[end : declaration.last])
            function.body = tuple(names.get(word, word) for word in words if word)
            function.qualifiers = program.text(declaration.parameters[1] + 1, end)

    def _without_duplicates(self, functions):
        kept = []
        for function in functions:
            same = next((f for f in kept if f.key == function.key and function.key is not None and
                         f.space_maps[0] != function.space_maps[0] and f.does == function.does), None)  # fmt: skip
            if same is None:
                kept.append(function)
            else:
                same.space_maps += function.space_maps
                erase(self.program.tokens, function.declaration.first, function.declaration.last)
        return kept

    def _merge_set(self, functions):
        """Groups the functions of one name that a call could confuse."""
        group_of = {}
        for i, a in enumerate(functions):
            for b in functions[i + 1 :]:
                if a.body and b.body and a.header != b.header and self._overlap(a, b):
                    self._refuse([a, b], "one is a template of another kind")
                if a.body and b.body and self._mistakable(a, b):
                    group = group_of.get(id(a)) or [a]
                    for other in group_of.get(id(b)) or [b]:
                        if not any(other is f for f in group):
                            group.append(other)
                    for f in group:
                        group_of[id(f)] = group
        for group in {id(group): group for group in group_of.values()}.values():
            self._can_be_told(group)
            self.groups.append(group)

    def _mistakable(self, a, b):
        """Returns whether calls of `a` and `b` look the same in C++ and differ in address spaces."""
        count = min(len(a.parameters), len(b.parameters))
        if a.header != b.header or max(a.least, b.least) > count or a.does == b.does:
            return False
        if not any(
            x.get(at) != y[at] for x in a.space_maps for y in b.space_maps for at in y if at[0] < count and at in x
        ):
            return False
        for x, y in zip(a.types, b.types):
            if x != y and not (" ".join(x) in _WHOLE and " ".join(y) in _WHOLE):
                without = [[word for word in words if word != "const"] for words in (x, y)]
                if without[0] != without[1] or not a.header:
                    return False
        return True

    def _overlap(self, a, b):
        """Returns whether the same arguments could fit a template and another function, which differ in address
        spaces."""
        count = min(len(a.parameters), len(b.parameters))
        pairs = [(x.get(at), y[at]) for x in a.space_maps for y in b.space_maps for at in y if at[0] < count]
        differ = any(x and y and x != y for x, y in pairs)
        if not differ or max(a.least, b.least) > count or a.does == b.does:
            return False
        for x, y in zip(a.types, b.types):
            x, y = ([word for word in words if word != "const"] for words in (x, y))
            same = len(x) == len(y) and all(v == w or "$" in (v[0], w[0]) for v, w in zip(x, y))
            if not same and not (" ".join(x) in _WHOLE and " ".join(y) in _WHOLE):
                return False
        return True

    def _can_be_told(self, group):
        program, first = self.program, group[0].declaration
        tokens, name = program.tokens, first.name
        for function in group:
            declaration = function.declaration
            special = declaration.name.startswith("operator") and (name[8:9].isalpha() or name == "operator=")
            before = tokens[declaration.name_at - 1].text
            specialized = tokens[declaration.parameters[0] - 1].text == ">" and not name.startswith("operator")
            if (declaration.in_class and name == declaration.owner.name) or special or before in ("~", "::") or \
                    specialized or any(last == opening + 1 for opening, last in declaration.templates):  # fmt: skip
                self._refuse(group, "this kind of function cannot be chosen as it runs")
            if (function.result, function.qualifiers) != (group[0].result, group[0].qualifiers):
                self._refuse(group, "their results or qualifiers differ")
            if "kernel" in declaration.attributes or "MSL_KERNEL" in " ".join(function.result):
                self._refuse(group, "kernels cannot be chosen as they run")
        differing, seen = self._differing(group), {}
        if any(depth > 1 or depth == 1 and group[0].parameters[at].is_pointer for at, depth in differing):
            self._refuse(group, "what pointers to pointers point to is not looked at")
        for function in group:
            for spaces in function.space_maps:
                places = tuple(_PLACES[spaces.get(at)] for at in differing)
                if seen.setdefault(places, function) is not function:
                    self._refuse([seen[places], function], "no address tells device from constant memory")

    def _differing(self, group):
        count = min(len(function.parameters) for function in group)
        space_maps = [spaces for function in group for spaces in function.space_maps]
        places = sorted({at for spaces in space_maps for at in spaces if at[0] < count})
        return [at for at in places if len({_PLACES[v.get(at)] for v in space_maps}) > 1] or places

    def _refuse(self, group, reason):
        tokens = self.program.tokens
        one, other = (tokens[f.declaration.name_at or f.declaration.first] for f in group[:2])
        raise error_at(
            other,
            f"'{group[0].declaration.name}' differs from the one at {one.file}:{one.line} in address "
            f"spaces only, and {reason}",
        )

    # Writing --------------------------------------------------------------------------------------------------------

    def write(self):
        """Renames the functions and writes those that choose between them. This is the last rewrite."""
        for number, group in enumerate(self.groups):
            last = max((function.declaration for function in group), key=lambda declaration: declaration.last)
            arities = {len(f.parameters) for f in group} | {n for f in group for n in range(f.least, len(f.parameters))}
            if all(f.types == group[0].types for f in group):
                arities = {None}  # one chooser, with the defaults of the first function
            choosers = [self._chooser(group, arity, number) for arity in sorted(arities, key=str)]
            tokens = self.program.tokens
            for i, function in enumerate(group):
                name_at, opening = function.declaration.name_at, function.declaration.parameters[0]
                erase(tokens, name_at, opening)
                tokens[name_at].text = _name(number, i)
            first = tokens[group[0].declaration.first]
            if group[0].declaration.in_class:
                first.text = " ".join(head + body for head, _, body in choosers) + " " + first.text
            else:
                first.text = " ".join(head + ";" for head, _, _ in choosers) + " " + first.text
                tokens[last.last - 1].text += " " + " ".join(head + body for _, head, body in choosers)

    def _chooser(self, group, arity, number):
        """Returns (head, head without defaults, body) of the function that chooses, for `arity` arguments or for
        all."""
        program, chosen = self.program, group[0]
        if arity is not None:
            chosen = next(f for f in group if f.least <= arity <= len(f.parameters))
        declaration = chosen.declaration
        count = len(chosen.parameters) if arity is None else arity
        names, types, defaults = [], [], []
        for position, parameter in enumerate(chosen.parameters[:count]):
            name = f"msl_{position}"
            others = {" ".join(f.types[position]) for f in group if position < len(f.parameters)}
            types.append(f"long {name}" if len(others) > 1 and others <= _WHOLE else _named(program, parameter, name))
            has_default = arity is None and parameter.default is not None
            defaults.append(" " + program.text(parameter.default, parameter.last) if has_default else "")
            names.append(name + (" ..." if "..." in types[-1] else ""))
        between = program.text(declaration.head, declaration.name_at).replace("constexpr", "")
        between += " " + program.text(declaration.name_at, declaration.parameters[0])
        after = program.text(declaration.parameters[1] + 1, _head_end(program, declaration))
        heads = [
            f"{_templates(program, declaration, with_defaults)} {between}({', '.join(parameters)}) {after}"
            for with_defaults, parameters in ((True, [t + d for t, d in zip(types, defaults)]), (False, types))
        ]
        return *heads, f" {{ {self._body(group, count, names, number, _template_arguments(program, declaration))} }}"

    def _body(self, group, count, names, number, arguments):
        taken = [(i, f) for i, f in enumerate(group) if f.least <= count <= len(f.parameters)]
        differing = [at for at in self._differing([f for _, f in taken]) if at[0] < count]
        texts = []
        for i, function in taken:
            call = f"return {_name(number, i)}{arguments}({', '.join(names)});"
            if len(taken) == 1:
                return call
            for spaces in function.space_maps:
                tests = [
                    f"msl::space_of({self._pointer(function, at, names)}) == msl::Space::{_PLACES[spaces[at]]}"
                    for at in differing
                    if spaces.get(at)
                ]
                texts.append((len(differing) - len(tests), f"if ({' && '.join(tests) or 'true'}) {call}"))
        # Functions that take any address space come last.
        texts = dict.fromkeys(text for _, text in sorted(texts, key=lambda text: text[0]))
        return " ".join(texts) + " msl::fault();"

    def _pointer(self, function, at, names):
        position, depth = at
        if position < 0:
            return "this"
        return names[position] if function.parameters[position].is_pointer or depth else f"&{names[position]}"


def _name(number, i):
    return f"msl_overload_{number}_{i}"


def _head_end(program, declaration):
    """Returns the index after the words that follow a function's parameters."""
    i = declaration.parameters[1] + 1
    while i < declaration.body[0] and program.tokens[i].text != ":":
        i += 1
    return i


def _templates(program, declaration, with_defaults):
    texts = []
    for opening, closing in declaration.templates:
        parameters = []
        for first, last in program.split_parameters(opening, closing):
            end = next((i for i in range(first, last) if program.tokens[i].text == "="), last)
            parameters.append(program.text(first, last if with_defaults else end))
        texts.append(f"template <{', '.join(parameters)}>")
    return " ".join(texts)


def _named(program, parameter, name):
    """Returns the text of a parameter with another name."""
    tokens, last = program.tokens, parameter.last if parameter.default is None else parameter.default
    at = last if parameter.name is None else parameter.name
    after = last if parameter.name is None else parameter.name + 1
    if parameter.name is None and any(tokens[i].text in ("[", "(") for i in range(parameter.first, last)):
        raise error_at(
            tokens[parameter.first],
            "this parameter must have a name: its function's overloads differ in address spaces",
        )
    return " ".join(filter(None, (program.text(parameter.first, at), name, program.text(after, last))))


def _template_arguments(program, declaration):
    """Returns the template arguments that follow the name of a function in a call, as far as its template's parameters
    have names."""
    tokens, names = program.tokens, []
    for opening, closing in declaration.templates[-1:]:
        for first, last in program.split_parameters(opening, closing):
            end = next((i for i in range(first, last) if tokens[i].text == "="), last)
            if end - first < 2 or tokens[end - 1].kind != "id" or tokens[end - 2].text == "::":
                break
            pack = "..." in (tokens[i].text for i in range(first, end))
            names.append(tokens[end - 1].text + (" ..." if pack else ""))
    return f"<{', '.join(names)}>" if names else ""


def _parameters(program, reader, declaration):
    tokens, found = program.tokens, []
    for first, last in program.split_parameters(*declaration.parameters):
        if program.text(first, last) == "void":
            continue
        read = reader.read(first)
        declarator = read.declarators[0] if read.declarators else None
        pointers = list(declarator.pointers) if declarator else []
        is_pointer = bool(pointers) and tokens[pointers[-1]].text == "*"
        if declarator and declarator.is_array and not pointers:
            pointers, is_pointer = [declarator.last], True  # an array becomes a pointer
        spaces, before = [], first
        for pointer in pointers:
            words = [*read.spaces, *(declarator.spaces if declarator else ())]
            named = sorted((tokens[s].text for s in words if before <= s < pointer), key="thread".__eq__)
            spaces.append(named[0] if named else None)  # `thread` beside another space has no meaning
            before = pointer
        default = next((i for i in range(first, last) if tokens[i].text == "="), None)
        name = declarator.name if declarator else None
        found.append(Parameter(first, last, name, spaces[::-1], is_pointer, default))
    return found


def _space_map(program, function):
    """Returns {(position, depth): the space that this pointer of a parameter points into, None for any}; the object's
    position is -1."""
    tokens, declaration = program.tokens, function.declaration
    spaces = {
        (position, depth): space
        for position, parameter in enumerate(function.parameters)
        for depth, space in enumerate(parameter.spaces)
    }
    spaces[-1, 0] = None
    for token in tokens[declaration.parameters[1] + 1 : declaration.last]:
        if token.text in ("{", ":", ";", "->", "="):
            break
        if token.text in SPACES:
            spaces[-1, 0] = token.text
    return spaces
