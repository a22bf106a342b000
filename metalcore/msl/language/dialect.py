"""Rewrites of what Clang, and so Metal, accepts and another compiler does not: GCC 12 in C++17, NVRTC in C++20."""

from .rewrite import erase


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
