"""Rewrites of what Clang, and so Metal, accepts and another compiler does not: GCC 12 in C++17, NVRTC in C++20.

Two things more need another text in C++: what a program calls as our metal_stdlib calls its own, even if Apple's does
not have the name; and constructors of vectors with too few components. Metal refuses `float4(1, 2, 3)`, while
`float4{1, 2, 3}` is right and leaves zeros. In C++ both call the same constructor, so `V(a, b)` becomes
`msl::complete<V>(a, b)`, which counts the components of its arguments.
"""

import functools
import re
from pathlib import Path

from .rewrite import erase
from .tokens import matching_angle

_NAMESPACES = {"simd", "msl", "std"}  # of the headers, beside metal
_TRAITS = Path(__file__).parents[1] / "include" / "metal" / "type_traits.h"


@functools.lru_cache(maxsize=1)
def traits():
    """Returns the names of namespace metal's type traits."""
    text = _TRAITS.read_text(encoding="utf-8")
    imported = re.findall(r"^using std::(\w+);", text, re.MULTILINE)
    made = re.findall(r"\b(?:MSL_TRAIT|MSL_NUMBER_TRAIT|MSL_RELATION)\((is_\w+)", text)
    return {*imported, *made, *(name + "_v" for name in made)}


def rename_like_ours(program, kernels):
    """Renames what a program calls `decay`, `rank` or `simd`, everywhere in it.

    With `using namespace metal` a trait's name would be ambiguous, and a namespace's name cannot be declared again.
    """
    tokens = program.tokens
    own = {
        declaration.name
        for declaration in program.declarations
        if not declaration.scope and declaration.name_at is not None and declaration.kind in ("variable", "function")
        and "<" not in program.text(declaration.name_at + 1, declaration.name_at + 2)
    } & (traits() | _NAMESPACES)  # fmt: skip
    for i, token in enumerate(tokens):
        if token.text in own and token.kind == "id" and not _is_of_headers(tokens, i):
            token.text += "_of_program"
    for kernel in kernels:
        for argument in kernel.arguments:
            if argument.condition in own:
                argument.condition += "_of_program"


def _is_of_headers(tokens, i):
    if tokens[i].text in _NAMESPACES and tokens[i + 1].text == "::":
        return True
    return tokens[i - 1].text == "::" and tokens[i - 2].text in ("metal", "std")


_SCALARS = "bool|u?char|u?short|u?int|u?long|half|bfloat|float"
_NAME = re.compile(rf"(?:packed_)?(?:{_SCALARS})([34])")
_TEMPLATE = re.compile(r"(?:metal::)?(?:packed_)?vec<.*,([34])>")
_SCALAR = re.compile(_SCALARS)


def count_components(program):
    """Lets calls of vectors' constructors, and variables with such an initializer in functions, be counted."""
    tokens = program.tokens
    bodies = [d.body for d in program.walk() if d.kind == "function" and d.body]
    for i, token in enumerate(tokens):
        if token.kind != "id":
            continue
        name_end, width = _vector(program, i)
        if width is None:
            continue
        first = _qualified_start(tokens, i)
        if _has_too_few(program, name_end, width):
            tokens[first].text = "msl::complete<" + tokens[first].text
            tokens[name_end - 1].text += ">"
        elif tokens[name_end].kind == "id" and any(a < i < b for a, b in bodies):
            opening = name_end + 1
            if _has_too_few(program, opening, width):
                tokens[opening].text += f"msl::complete<{program.text(first, name_end)}>("
                tokens[program.partner[opening]].text += ")"


def _vector(program, i):
    """Returns (the index after the name of a type at i, its number of components); (i, None) for other names."""
    tokens = program.tokens
    if match := _NAME.fullmatch(tokens[i].text):
        return i + 1, int(match[1])
    if tokens[i].text in ("vec", "packed_vec") and tokens[i + 1].text == "<":
        close = matching_angle(tokens, i + 1)
        if close is not None and (match := _TEMPLATE.fullmatch("".join(t.text for t in tokens[i : close + 1]))):
            return close + 1, int(match[1])
    words = "".join(program.aliases().get(tokens[i].text, ()))
    match = _NAME.fullmatch(words.removeprefix("metal::")) or _TEMPLATE.fullmatch(words)
    return (i + 1, int(match[1])) if match else (i, None)


def _qualified_start(tokens, i):
    while tokens[i - 1].text == "::":
        i -= 2 if tokens[i - 2].kind == "id" else 1
    return i


def _has_too_few(program, opening, width):
    """Returns whether the parentheses at `opening` hold fewer expressions than components, and more than one."""
    tokens = program.tokens
    if opening >= len(tokens) or tokens[opening].text != "(":
        return False
    arguments = program.split_parameters(opening, program.partner[opening])
    are_types = any(last == first + 1 and _SCALAR.fullmatch(tokens[first].text) for first, last in arguments)
    braced = any(tokens[first].text == "{" for first, _ in arguments)
    return 1 < len(arguments) < width and not are_types and not braced


def adapt_dialect(program):
    _drop_repeated_qualifiers(program)
    _drop_declarations_of_air(program)
    _declare_opaque_enumerations(program)
    _prefer_promotion_of_small_floats(program)
    _overload_instead_of_specializing_members(program)
    _fill_designated_ranges(program)
    _name_extended_vectors(program)
    _keep_aggregates(program)
    _qualify_specializations(program)
    _share_constant_arrays(program)


def _drop_repeated_qualifiers(program):
    """Erases the second `const` of `const const T`, as `const device const T*` is once it has no address space."""
    seen = set()
    for token in program.tokens:
        if token.text in ("const", "volatile"):
            if token.text in seen:
                token.text = ""
            seen.add(token.text)
        elif token.text:
            seen.clear()


def _drop_declarations_of_air(program):
    """Erases `R f(…) __asm("air.…");`, which declares a function of Apple's compiler: the headers have the supported
    ones."""
    for declaration in program.walk():
        if declaration.kind == "function" and declaration.body is None:
            words = [token.text for token in program.tokens[declaration.parameters[1] : declaration.last]]
            if any(word.startswith('"air.') for word in words) and {"__asm", "__asm__", "asm"} & {*words}:
                erase(program.tokens, declaration.first, declaration.last)


def _declare_opaque_enumerations(program):
    """Writes `enum E : int;` for `typedef enum E : int E;`, to which Apple's NS_ENUM expands."""
    tokens = program.tokens
    for declaration in program.walk():
        first, last = declaration.first, declaration.last
        words = [token.text for token in tokens[first:last]]
        if words[:2] == ["typedef", "enum"] and words[3:4] == [":"] and "{" not in words and words[-2] == words[2]:
            tokens[first].text = tokens[last - 2].text = ""


def _prefer_promotion_of_small_floats(program):
    """Adds overloads for half and bfloat where f(float) stands beside f(Complex). MSL calls f(float) for a half, since
    promotion beats conversion; here half is a class, and both are conversions."""
    overloads = {}
    for declaration in program.walk():
        if declaration.kind == "function" and not declaration.templates and declaration.parameters:
            types = [program.type_text(*part) for part in program.split_parameters(*declaration.parameters)]
            overloads.setdefault((declaration.scope, id(declaration.owner), declaration.name), []).append(
                (declaration, types)
            )
    for found in overloads.values():
        for declaration, types in found:
            if declaration.body is None or len(types) != 1 or types[0] not in ("float", "const float"):
                continue
            others = [
                other[0].split()
                for other_declaration, other in found
                if len(other) == 1 and other_declaration is not declaration
            ]
            if not others or declaration.owner is not None:
                continue
            for small in ("half", "bfloat"):
                if not any(small in "".join(other) for other in others):
                    program.tokens[declaration.last - 1].text += (
                        f" METAL_FUNC auto {declaration.name}({small} msl_x) "
                        f"{{ return {declaration.name}(float(msl_x)); }}"
                    )


def _overload_instead_of_specializing_members(program):
    """Writes an overload for `template <> R f(T)` inside a class, where GCC 12 has no explicit specialization."""
    tokens = program.tokens
    for declaration in program.walk():
        if declaration.kind == "function" and declaration.in_class and declaration.templates:
            opening, closing = declaration.templates[-1]
            if closing == opening + 1:
                erase(tokens, opening - 1, closing + 1)
                if tokens[declaration.parameters[0] - 1].text == ">":  # f<T>(…)
                    opening = next(i for i in range(declaration.name_at + 1, declaration.last) if tokens[i].text == "<")
                    erase(tokens, opening, declaration.parameters[0])


def _fill_designated_ranges(program):
    """Writes GNU C's `T a[N] = {[first ... last] = value};` as an assignment after the declaration."""
    tokens, partner = program.tokens, program.partner
    for i in range(2, len(tokens) - 1):
        if tokens[i].text != "{" or tokens[i - 1].text != "=" or tokens[i - 2].text != "]" or tokens[i + 1].text != "[":
            continue
        name = i - 2
        while tokens[name].text == "]":
            name = partner[name] - 1
        parts, fills = program.split_parameters(i, partner[i]), []
        for first, last in parts:
            if tokens[first].text != "[" or tokens[partner[first] + 1].text != "=":
                break
            close = partner[first]
            dots = next((j for j in range(first, close) if tokens[j].text == "..."), None)
            low = program.text(first + 1, dots or close)
            high = program.text(dots + 1, close) if dots else low
            value = program.text(close + 2, last)
            fills.append(
                f" for (long msl_i = {low}; msl_i <= long({high}); ++msl_i) {tokens[name].text}[msl_i] = {value};"
            )
        if len(fills) == len(parts):
            erase(tokens, i + 1, partner[i])
            end = next(j for j in range(partner[i], len(tokens)) if tokens[j].text == ";")
            tokens[end].text += "".join(fills)


def _name_extended_vectors(program):
    """Makes `typedef T name __attribute__((ext_vector_type(N)))` name vec<T, N>; likewise `using`, wherever the
    attribute stands."""
    tokens = program.tokens
    for i in range(len(tokens)):
        if tokens[i].text != "ext_vector_type" or tokens[i + 1].text != "(":
            continue
        count = program.text(i + 2, program.partner[i + 1])
        first = next(j for j in range(i, -1, -1) if tokens[j].text == "__attribute__")
        last = program.partner[first + 1] + 1
        start = next(j for j in range(first, -1, -1) if tokens[j].text in ("typedef", "=")) + 1
        end = next(j for j in range(last, len(tokens)) if tokens[j].text == ";")
        erase(tokens, first, last)
        element = [j for j in range(start, end) if tokens[j].text]
        if tokens[start - 1].text == "typedef":
            element.pop()  # the name
        tokens[element[0]].text = "metal::vec<" + tokens[element[0]].text
        tokens[element[-1]].text += f", {count}>"


def _keep_aggregates(program):
    """Erases constructors that are all `= default`: in C++20 a class that declares a constructor is no aggregate."""
    tokens = program.tokens
    for declaration in program.walk():
        members = declaration.members if declaration.kind == "class" else ()
        constructors = [m for m in members if m.kind == "function" and m.name == declaration.name]
        if all(_is_defaulted(tokens, constructor) for constructor in constructors):
            for constructor in constructors:
                erase(tokens, constructor.first, constructor.last)


def _is_defaulted(tokens, function):
    words = [token.text for token in tokens[function.first : function.last] if token.text]
    return words[-3:] == ["=", "default", ";"] or not words  # a duplicate has been erased


# Templates of namespace metal that programs specialize for their own types.
_SPECIALIZED = {
    "_numeric_limits_impl", "numeric_limits", "is_integral", "is_floating_point", "is_arithmetic", "is_signed",
    "is_unsigned", "is_scalar", "is_fundamental", "is_same", "is_convertible", "make_scalar", "common_type",
    "is_vector", "vec_elements", "__is_valid_simdgroup_type",
}  # fmt: skip


def _qualify_specializations(program):
    """Gives the template's full name to a specialization that stands outside of namespace metal, where MSL finds the
    template through `using namespace metal`."""
    tokens, specializations, own = program.tokens, [], set()
    for declaration in program.walk():
        if declaration.kind == "class" and declaration.is_template:
            at = declaration.name_at
            if tokens[at + 1].text != "<":
                own.add(declaration.name)
            elif tokens[at - 1].text in ("struct", "class") and "metal" not in declaration.scope:
                specializations.append(declaration)
    for declaration in specializations:
        if declaration.name in _SPECIALIZED - own:
            tokens[declaration.name_at].text = f"metal::{declaration.name}"


def _share_constant_arrays(program):
    """Makes `constexpr T a[] = …` in a function static: NVRTC would fill a copy in each thread's own memory."""
    tokens = program.tokens
    for declaration in program.walk():
        head = [token.text for token in tokens[declaration.head : declaration.name_at or declaration.head]]
        if declaration.kind != "function" or declaration.body is None or "constexpr" in head:
            continue
        first, last = declaration.body
        for i in range(first + 1, last):
            if tokens[i].text == "constexpr" and tokens[i - 1].text in (";", "{", "}", ""):
                end = next(j for j in range(i, last) if tokens[j].text in ("=", ";", "(", "{"))
                if tokens[end].text != "(" and tokens[end - 1].text == "]":
                    tokens[i].text = "static constexpr"
