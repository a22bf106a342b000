"""What Clang, and so Metal, accepts and GCC does not."""

from .rewrite import erase


def adapt_to_gcc(program):
    _store_half_in_anonymous_structs(program)
    _overload_instead_of_specializing_members(program)
    _fill_designated_ranges(program)


def _store_half_in_anonymous_structs(program):
    """C++ allows no class with constructors in an anonymous struct, which half is here: _Float16 stands in for it."""
    tokens = program.tokens
    names = {"half"}
    for declaration in program.walk():
        words = [token.text for token in tokens[declaration.first : declaration.last]]
        if words[:1] == ["typedef"] and len(words) == 4 and words[1] in names:
            names.add(words[2])
        elif words[:1] == ["using"] and words[2:3] == ["="] and len(words) == 5 and words[3] in names:
            names.add(words[1])
    for i in range(len(tokens) - 1):
        if tokens[i].text == "struct" and tokens[i + 1].text == "{" and tokens[program.partner[i + 1] + 1].text == ";":
            for token in tokens[i + 2 : program.partner[i + 1]]:
                if token.text in names:
                    token.text = "_Float16"


def _overload_instead_of_specializing_members(program):
    """`template <> R f(T)` inside a class: GCC 12 has no explicit specialization there, an overload does the same."""
    tokens = program.tokens
    for declaration in program.walk():
        if declaration.kind == "function" and declaration.in_class and declaration.templates:
            opening, closing = declaration.templates[-1]
            if closing == opening + 1:
                erase(tokens, opening - 1, closing + 1)
                name_end = declaration.name_at + 1
                if not declaration.name.startswith("operator") and tokens[name_end].text == "<":
                    erase(tokens, name_end, declaration.parameters[0])


def _fill_designated_ranges(program):
    """`T a[N] = {[first ... last] = value};`, of GNU C, becomes an assignment after the declaration."""
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
            fills.append(f" for (long msl_i = {low}; msl_i <= long({high}); ++msl_i) {tokens[name].text}[msl_i] = {value};")
        if len(fills) == len(parts):
            erase(tokens, i + 1, partner[i])
            end = next(j for j in range(partner[i], len(tokens)) if tokens[j].text == ";")
            tokens[end].text += "".join(fills)
