"""Anonymous structs with members that have constructors, as half, bfloat and vectors do here.

Clang and NVRTC accept them. GCC refuses such a member in an anonymous struct, except where the member's type depends on
a template's argument. So the class that has the struct is defined inside a template, as

    template <class msl_any> struct msl_anonymous_0 { typedef struct Block {…} msl_type; };
    using msl_class_0 = msl_anonymous_0<void>::msl_type; using Block = msl_class_0;

or inside a generic lambda in a function, where C++ allows no template. The types of the struct's members are written in
terms of the template's argument.
"""

from dataclasses import dataclass

from .parse import Declaration
from .rewrite import erase

_CLASS_KEYS = ("struct", "class", "union")
# Types without constructors.
_PLAIN = {
    "bool", "char", "signed", "unsigned", "short", "int", "long", "float", "const", "volatile", "uchar", "ushort",
    "uint", "ulong", "size_t", "ptrdiff_t", *(f"{u}int{bits}_t" for u in ("", "u") for bits in (8, 16, 32, 64)),
}  # fmt: skip


@dataclass
class Wrapped:
    """A class to be defined in a template, or in a lambda."""

    start: int  # index of the first token of its statement
    key: int  # of struct, class or union
    body: int  # of the opening brace
    local: bool
    mentions: list  # indices of the keyword in `struct Block* b`, which goes because Block becomes an alias


def find_anonymous_structs(program):
    """Returns what define_in_templates() needs. The tokens must be unchanged.

    Returns:
        (classes, types): each Wrapped, and (first, last, marker) of each type that must depend on `marker`.
    """
    tokens, found, types = program.tokens, {}, []
    classes = [d for d in program.walk() if d.kind == "class" and d.body]
    functions = [d for d in program.walk() if d.kind == "function" and d.body]
    for i in range(len(tokens) - 1):
        if tokens[i].text != "struct" or tokens[i + 1].text != "{":
            continue
        if tokens[program.partner[i + 1] + 1].text != ";":
            continue
        members = _types_of_members(program, i + 1)
        if not members:
            continue
        inside = next((d for d in functions if d.body[0] < i < d.body[1]), None)
        around = [d for d in classes if d.body[0] < i < d.body[1]]
        template = next((d for d in reversed(around) if d.is_template and d.name), None)
        if inside or not template:
            wrapped = _local_class(program, inside, i) if inside else _outermost_class(program, around)
            found.setdefault(wrapped.body, wrapped)
        marker = template.name if template and not inside else "msl_any"
        types += [(first, last, marker) for first, last in members]
    return list(found.values()), types


def define_in_templates(program, found):
    """Defines the classes whose anonymous structs have members with constructors, in a form that every compiler
    accepts."""
    tokens, (classes, types) = program.tokens, found
    for number, wrapped in enumerate(classes):
        _wrap(program, wrapped, number)
    for first, last, marker in types:
        tokens[first].text = "typename msl::in_template<" + tokens[first].text
        tokens[last - 1].text += f", {marker}>::type"


def _types_of_members(program, opening):
    """Returns (first, last) of the tokens of each member's type that may have a constructor, with members of
    members."""
    tokens, owner, types = program.tokens, Declaration("class", "", opening, opening, ()), []
    program._scope(opening + 1, program.partner[opening], (), owner)
    for member in program.walk(owner.members):
        if member.kind != "variable" or member.name_at is None:
            continue
        first = member.head
        while program._grouped(first):  # alignas(…)
            first = program.partner[first + 1] + 1
        words = {token.text for token in tokens[first : member.name_at] if token.text}
        if words - _PLAIN and not words & {"*", "&"}:
            types.append((first, member.name_at))
    return types


def _outermost_class(program, around):
    outermost = min(around, key=lambda d: d.first)
    body = outermost.body[0]
    key = next(i for i in range(outermost.head, body) if program._class_body(i, body + 1))
    return Wrapped(outermost.head, key, body, False, _mentions(program, key, body))


def _local_class(program, function, inner):
    """Returns the outermost class around a token of a function's body."""
    tokens, (first, last) = program.tokens, function.body
    for key in range(first + 1, inner):
        body = program._class_body(key, last) if tokens[key].text in _CLASS_KEYS else None
        if body is not None and body < inner < program.partner[body]:
            start = key
            while tokens[start - 1].text not in (";", "{", "}", ")", ":"):
                start -= 1
            return Wrapped(start, key, body, True, _mentions(program, key, body))
    raise AssertionError("an anonymous struct belongs to a class")


def _mentions(program, key, body):
    tokens, name = program.tokens, _name(program, key, body)
    return [
        i
        for i in range(len(tokens) - 2)
        if name and tokens[i].text in _CLASS_KEYS and tokens[i + 1].text == name and tokens[i + 2].text not in "{:;"
    ]


def _name(program, key, body):
    return next((token.text for token in program.tokens[key + 1 : body] if token.kind == "id"), "")


def _wrap(program, wrapped, number):
    tokens, key, close = program.tokens, wrapped.key, program.partner[wrapped.body]
    specifiers, name = program.text(wrapped.start, key), _name(program, key, wrapped.body)
    erase(tokens, wrapped.start, key)
    if wrapped.local:
        before = f"constexpr auto msl_anonymous_{number} = [](auto msl_value) {{ using msl_any = decltype(msl_value);"
        after = "return static_cast<msl_type*>(nullptr); }"
        made = f"std::remove_pointer_t<decltype(msl_anonymous_{number}(0))>"
    else:
        before, after = f"template <class msl_any> struct msl_anonymous_{number} {{", "}"
        made = f"typename msl_anonymous_{number}<void>::msl_type"
    tokens[key].text = f"{before} typedef {tokens[key].text}"
    tokens[close].text += f" msl_type; {after}; using msl_class_{number} = {made}"
    if name:
        tokens[close].text += f"; using {name} = msl_class_{number}"
    if tokens[close + 1].text != ";":
        tokens[close].text += f"; {specifiers} msl_class_{number}"
    for i in wrapped.mentions:
        tokens[i].text = ""
