"""`condition ? a : b` between types that have no common type in C++: half and bfloat are classes on the host.

The extent of a conditional is found by walking over tokens. A conditional whose extent is not certain is left as it is.
"""

from .tokens import CLOSING, matching_angle

ASSIGNMENTS = {"=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>="}

_STATEMENT_STARTS = {"(", "[", "{", "}", ";", ",", "?", ":", "return", "case", "else", "do"}


def wrap_conditionals(program):
    """Makes `c ? a : b` into `msl::chosen(c ? msl::arm(a) : msl::arm(b))`, in which a bfloat and a float may mix."""
    tokens, before, after = program.tokens, {}, {}
    for question, (start, colon, end) in _find(program).items():
        before[start] = before.get(start, "") + "msl::chosen("
        for place, text in ((question, " msl::arm("), (colon - 1, ")"), (colon, " msl::arm("), (end - 1, "))")):
            after[place] = after.get(place, "") + text
    for place, text in after.items():
        tokens[place].text += text
    for place, text in before.items():
        tokens[place].text = text + tokens[place].text


def _find(program):
    """Returns {index of `?`: (index of the condition's first token, index of `:`, index after the alternative)}.

    Each walk ends at the next `?` and uses what is known of that one, so that a long chain takes linear time.
    """
    templates = {d.name for d in program.walk() if d.is_template} | _STANDARD_TEMPLATES
    questions = [i for i, token in enumerate(program.tokens) if token.text == "?"]
    in_templates, colons, ends, found = {}, {}, {}, {}
    for i in questions:
        in_templates[i] = _in_template_arguments(program, i, templates, in_templates)
    for i in reversed(questions):
        colons[i] = _conditional_colon(program, i, colons)
        ends[i] = _expression_end(program, colons[i] + 1, ends) if colons[i] is not None else None
    for i in questions:
        start = _condition_start(program, i, templates)
        if not in_templates[i] and start is not None and ends[i] is not None:
            found[i] = start, colons[i], ends[i]
    return found


_STANDARD_TEMPLATES = {
    "is_same_v", "is_same", "is_integral_v", "is_floating_point_v", "is_signed_v", "is_unsigned_v", "numeric_limits",
    "vec", "static_cast", "as_type", "reinterpret_cast", "metal", "select", "enable_if_t", "conditional_t",
    "packed_vec", "array", "is_arithmetic_v", "is_scalar_v", "is_convertible_v", "simd_shuffle_down", "const_cast",
    "integral_constant", "extents", "dextents", "matmul2d", "convolution2d", "execution_simdgroups",
}  # fmt: skip


def _conditional_colon(program, i, colons):
    """Returns the index of the `:` that belongs to the `?` at i. `colons` has those of the later ones."""
    tokens, i = program.tokens, i + 1
    while i < len(tokens):
        text = tokens[i].text
        if text in CLOSING:
            i = program.partner[i]
        elif text == "?":
            if colons[i] is None:
                return None
            i = colons[i]
        elif text == ":":
            return i
        elif text in (")", "]", "}", ";"):
            return None
        i += 1
    return None


def _condition_start(program, i, templates):
    """Returns the index at which the condition before the `?` at i begins; None where it cannot be found."""
    tokens, i = program.tokens, i - 1
    while i >= 0:
        original = tokens[i].text
        if original in (")", "]", "}"):
            opening = program.partner[i]
            if original == "}" and tokens[opening - 1].kind != "id":
                return i + 1
            i = opening
        elif original in (">", ">>"):
            opening = _template_opening(program, i, templates)
            i = opening if opening is not None else i
        elif (
            original in _STATEMENT_STARTS
            or original in ASSIGNMENTS
            or original == "<"
            and tokens[i - 1].text in templates
        ):
            return i + 1
        i -= 1
    return None


def _in_template_arguments(program, i, templates, known):
    """Returns whether the `?` at i stands in a template's arguments, where a conditional chooses between constants.

    Args:
        known: the answers for the `?` before it.
    """
    tokens, i = program.tokens, i - 1
    while i > 0:
        text = tokens[i].text
        if text in (")", "]"):
            i = program.partner[i]
        elif text in (">", ">>"):
            opening = _template_opening(program, i, templates)
            i = opening if opening is not None else i
        elif text == "<" and tokens[i - 1].text in templates:
            return True
        elif text in ("(", "[", "{", "}", ";"):
            return False
        elif text == "?":
            return known[i]
        i -= 1
    return False


def _template_opening(program, i, templates):
    """Returns the index of the `<` of the template list that the `>` at i closes, or None where `>` is an operator."""
    tokens, depth, j = program.tokens, 0, i
    while j > 0:
        text = tokens[j].text
        if text in (")", "]", "}"):
            j = program.partner[j]
        elif text in (">", ">>"):
            depth += len(text)
        elif text == "<":
            depth -= 1
            if depth == 0:
                return (
                    j
                    if tokens[j - 1].text in templates
                    or tokens[i + 1].text in ("::", "(", "{")
                    and _looks_like_types(tokens, j, i)
                    else None
                )
        elif text in ("(", "[", "{", "}", ";", "?", "&&", "||"):
            return None
        j -= 1
    return None


def _looks_like_types(tokens, first, last):
    return all(
        t.kind in ("id", "num") or t.text in ("::", ",", "*", "&", "<", ">", ">>", "") for t in tokens[first + 1 : last]
    )


def _expression_end(program, i, ends):
    """Returns the index after the assignment expression that begins at i. `ends` has those of the later
    conditionals."""
    tokens = program.tokens
    while i < len(tokens):
        text = tokens[i].text
        if text in CLOSING:
            i = program.partner[i]
        elif text == "<" and tokens[i - 1].kind == "id":
            close = matching_angle(tokens, i)
            if (
                close is not None
                and _looks_like_types(tokens, i, close)
                and tokens[close + 1].text in ("(", "::", "{", ")", ",", ";", "?")
            ):
                i = close
        elif text == "?":
            return ends[i]
        elif text in (")", "]", "}", ";", ",", ":"):
            return i
        i += 1
    return None
