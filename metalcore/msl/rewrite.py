"""Rewrites of tokens that every C++ target needs: address spaces, literals, swizzles, conditionals, duplicates.

A rewrite changes the text of tokens in place (empty text: gone) and never moves them, so that indices into the program
and the user's lines stay valid.
"""

import re

from .errors import error_at
from .tokens import CLOSING, matching_angle

_SPACES = {"device", "constant", "thread", "threadgroup", "threadgroup_imageblock", "ray_data", "object_data"}
_SWIZZLE = re.compile(r"[xyzw]{2,4}|[rgba]{2,4}")
_ASSIGNMENTS = {"=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>=", "++", "--"}
_REFUSED = {
    "double": "'double' is not supported in Metal",
    "mpp": "Metal Performance Primitives (mpp::) are not supported",
    "tensor_ops": "Metal Performance Primitives (mpp::) are not supported",
    "visible_function_table": "visible function tables are not supported",
    "intersection_function_table": "intersection function tables are not supported",
    "raytracing": "raytracing is not supported",
    "acceleration_structure": "raytracing is not supported",
    "imageblock": "imageblocks are not supported",
    "command_buffer": "indirect command buffers are not supported",
    "render_command": "indirect command buffers are not supported",
    "compute_command": "indirect command buffers are not supported",
}
_TEXTURE = re.compile(r"(texture|depth)(1d|2d|3d|cube|_buffer)(_ms)?(_array)?|sampler")


def refuse_unsupported(program):
    """Raises an MSLError at the first thing that metalcore does not run."""
    tokens, declared = program.tokens, {d.name for d in program.walk()}
    for i, token in enumerate(tokens):
        if token.kind != "id" or token.text in declared:
            continue
        if token.text in _REFUSED:
            raise error_at(token, _REFUSED[token.text])
        if _TEXTURE.fullmatch(token.text) and i + 1 < len(tokens):
            following = tokens[i + 1]
            if following.text == "<" or (token.text == "sampler" and following.kind == "id"):
                raise error_at(token, f"textures and samplers ('{token.text}') are not supported")


def erase(tokens, first, last):
    for token in tokens[first:last]:
        token.text = ""


def erase_attributes(program):
    tokens = program.tokens
    for i in range(len(tokens)):
        end = program.attribute_end(i)
        if end is not None:
            erase(tokens, i, end)


def erase_address_spaces(program):
    """Address spaces go; `constant` leaves `const` where the type has none."""
    tokens = program.tokens
    for declaration in program.walk():  # constructors cannot be const
        if declaration.kind == "function" and declaration.in_class and declaration.name == declaration.scope[-1]:
            end = declaration.body[0] if declaration.body else declaration.last
            for token in tokens[declaration.parameters[1] : end]:
                if token.text in _SPACES:
                    token.text = ""
    for i, token in enumerate(tokens):
        if token.text == "coherent" and tokens[i + 1].text == "(" and tokens[i + 2].text in ("device", "system", "threadgroup"):
            erase(tokens, i, i + 4)
        elif token.text == "coherent" and tokens[i + 1].text in (*_SPACES, "volatile", "const"):
            token.text = ""
        elif token.text in _SPACES:
            token.text = "const" if token.text == "constant" and not _already_const(program, i) else ""


_SPECIFIER_STOPS = {"(", ")", "{", "}", ";", ",", "=", "*", "&", "&&", "[", "]", ":"}


def _already_const(program, i):
    tokens, j = program.tokens, i - 1
    while j >= 0 and tokens[j].text not in _SPECIFIER_STOPS and tokens[j].text not in ("<", ">"):
        if tokens[j].text == "const":
            return True
        j -= 1
    j = i + 1
    while j < len(tokens) and tokens[j].text not in _SPECIFIER_STOPS and tokens[j].text != ">":
        if tokens[j].text == "const":
            return True
        if tokens[j].text == "<":
            j = matching_angle(tokens, j) or j
        j += 1
    return False


def mark_float_literals(tokens):
    """MSL's literals are float unless they say otherwise; h and bf are its own suffixes."""
    for token in tokens:
        if token.kind != "num":
            continue
        text = token.text.lower()
        hexadecimal = text.startswith("0x")
        if not ("p" in text if hexadecimal else "." in text or "e" in text):
            if not hexadecimal and text.endswith("h"):
                token.text = f"msl::half_literal({token.text[:-1]}.0f)"
            continue
        if text.endswith("bf"):
            token.text = f"msl::bfloat_literal({token.text[:-2]}f)"
        elif text.endswith("h"):
            token.text = f"msl::half_literal({token.text[:-1]}f)"
        elif text.endswith("l"):
            token.text = token.text[:-1] + "f"
        elif not text.endswith("f") or (hexadecimal and "p" not in text):
            token.text += "f"


def rewrite_swizzles(program):
    """`v.xyz` becomes `v.template swizzle<0, 1, 2>()`, and `swizzle_ref` where it is assigned to."""
    tokens, members = program.tokens, _members_like_swizzles(program)
    for i in range(1, len(tokens) - 1):
        name = tokens[i].text
        if (
            tokens[i].kind == "id"
            and tokens[i - 1].text in (".", "->")
            and _SWIZZLE.fullmatch(name)
            and name not in members
            and tokens[i + 1].text != "("
        ):
            indices = ", ".join(str(("xyzw" if name[0] in "xyzw" else "rgba").index(letter)) for letter in name)
            assigned = tokens[i + 1].text in _ASSIGNMENTS
            tokens[i].text = f"template swizzle{'_ref' if assigned else ''}<{indices}>()"


def _members_like_swizzles(program):
    tokens, found = program.tokens, set()
    for i, token in enumerate(tokens):
        if token.text in ("struct", "class", "union"):
            body = program._class_body(i, len(tokens))
            if body is None:
                continue
            for j in range(body + 1, program.partner[body]):
                if (
                    tokens[j].kind == "id"
                    and _SWIZZLE.fullmatch(tokens[j].text)
                    and tokens[j - 1].text not in (".", "->")
                    and tokens[j + 1].text in (";", ",", "[", "=", "{", ":")
                ):
                    found.add(tokens[j].text)
    return found


# `a ? b : c` with a small float -----------------------------------------------------------------------------------

_STATEMENT_STARTS = {"(", "[", "{", "}", ";", ",", "?", ":", "return", "case", "else", "do"}


def wrap_conditionals(program):
    """`c ? a : b` becomes `msl::chosen(c ? msl::arm(a) : msl::arm(b))`, in which a bfloat and a float may mix."""
    tokens, before, after = program.tokens, {}, {}
    templates = {d.name for d in program.walk() if d.is_template} | _STANDARD_TEMPLATES
    for i, token in enumerate(tokens):
        if token.text != "?" or _in_template_arguments(program, i, templates):
            continue
        colon = _conditional_colon(program, i)
        start = _condition_start(program, i, templates)
        end = _expression_end(program, colon + 1) if colon is not None else None
        if start is None or end is None:
            continue
        before[start] = before.get(start, "") + "msl::chosen("
        for place, text in ((i, " msl::arm("), (colon - 1, ")"), (colon, " msl::arm("), (end - 1, "))")):
            after[place] = after.get(place, "") + text
    for place, text in after.items():
        tokens[place].text += text
    for place, text in before.items():
        tokens[place].text = text + tokens[place].text


_STANDARD_TEMPLATES = {
    "is_same_v", "is_same", "is_integral_v", "is_floating_point_v", "is_signed_v", "is_unsigned_v", "numeric_limits", "vec",
    "static_cast", "as_type", "reinterpret_cast", "metal", "select", "enable_if_t", "conditional_t", "packed_vec", "array",
    "is_arithmetic_v", "is_scalar_v", "is_convertible_v", "simd_shuffle_down", "const_cast", "integral_constant",
}  # fmt: skip


def _conditional_colon(program, i):
    """The index of the `:` that belongs to the `?` at i."""
    tokens, depth, i = program.tokens, 0, i + 1
    while i < len(tokens):
        text = tokens[i].text
        if text in CLOSING:
            i = program.partner[i]
        elif text == "?":
            depth += 1
        elif text == ":":
            if depth == 0:
                return i
            depth -= 1
        elif text in (")", "]", "}", ";"):
            return None
        i += 1
    return None


def _condition_start(program, i, templates):
    """The index at which the condition before the `?` at i begins; None where that cannot be told."""
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
        elif original in _STATEMENT_STARTS or original in _ASSIGNMENTS and original not in ("++", "--"):
            return i + 1
        elif original == "<" and tokens[i - 1].text in templates:
            return i + 1
        i -= 1
    return None


def _in_template_arguments(program, i, templates):
    """Whether the token at i stands in a template's arguments, where only constants are chosen between."""
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
        i -= 1
    return False


def _template_opening(program, i, templates):
    """The index of the `<` of the template list that the `>` at i closes, or None where `>` is an operator."""
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
                return j if tokens[j - 1].text in templates or tokens[i + 1].text in ("::", "(", "{") and _looks_like_types(tokens, j, i) else None
        elif text in ("(", "[", "{", "}", ";", "?", "&&", "||"):
            return None
        j -= 1
    return None


def _looks_like_types(tokens, first, last):
    return all(t.kind in ("id", "num") or t.text in ("::", ",", "*", "&", "<", ">", ">>", "") for t in tokens[first + 1 : last])


def _expression_end(program, i):
    """The index after the assignment expression that begins at i."""
    tokens, depth = program.tokens, 0
    while i < len(tokens):
        text = tokens[i].text
        if text in CLOSING:
            i = program.partner[i]
        elif text == "<" and tokens[i - 1].kind == "id":
            close = matching_angle(tokens, i)
            if close is not None and _looks_like_types(tokens, i, close) and tokens[close + 1].text in ("(", "::", "{", ")", ",", ";"):
                i = close
        elif text == "?":
            depth += 1
        elif text == ":" and depth:
            depth -= 1
        elif text in (")", "]", "}", ";", ",", ":"):
            return i
        i += 1
    return None


# Declarations that only differed in address spaces ----------------------------------------------------------------


def drop_duplicates(program, originals):
    """Drops functions, members and specializations that differed from an earlier one in address spaces only.

    Args:
        originals: the text of each token before address spaces were erased.
    """
    seen = {}
    for declaration in program.walk():
        key = _key(program, declaration)
        if key is None:
            continue
        original = tuple(originals[declaration.first : _signature_end(declaration)])
        if seen.setdefault(key, original) != original:
            erase(program.tokens, declaration.first, declaration.last)


def _signature_end(declaration):
    if declaration.kind == "class":
        return declaration.body[0]
    return declaration.body[0] if declaration.body else declaration.last


def _key(program, declaration):
    tokens = program.tokens
    if declaration.kind == "function":
        if declaration.body is None and not declaration.in_class and tokens[declaration.last - 2].text not in ("delete", "default"):
            return None
        opening, closing = declaration.parameters
        parts = [_words(tokens, declaration.head, declaration.name_at), [declaration.name]]
        parts.append(_words(tokens, declaration.name_at, opening))
        for first, last in program.split_parameters(opening, closing):
            parts.append(_type_words(program, first, last))
        end = next((i for i in range(closing, declaration.last) if tokens[i].text in ("{", ":", ";", "=")), declaration.last)
        parts.append(_words(tokens, closing + 1, end))
    elif declaration.kind == "class":
        if not declaration.is_template:
            return None
        parts = [_words(tokens, declaration.head, declaration.body[0])]
    elif declaration.kind == "variable" and declaration.is_template:
        end = next((i for i in range(declaration.head, declaration.last) if tokens[i].text in ("=", "{", ";")), declaration.last)
        parts = [_words(tokens, declaration.head, end)]
    else:
        return None
    names = {}
    header = []
    for opening, closing in declaration.templates:
        for first, last in program.split_parameters(opening, closing):
            name = _template_parameter_name(tokens, first, last)
            if name is not None:
                names[name] = f"${len(names)}"
        header.append(_words(tokens, opening, closing))
    return (
        declaration.kind,
        declaration.scope,
        id(declaration.owner),
        tuple(tuple(names.get(word, word) for word in part) for part in header + parts),
    )


def _template_parameter_name(tokens, first, last):
    end = next((i for i in range(first, last) if tokens[i].text == "="), last)
    named = end - first > 1 and tokens[end - 1].kind == "id" and tokens[end - 2].text != "::"
    return tokens[end - 1].text if named else None


_IRRELEVANT = {"", "inline", "static", "METAL_FUNC", "constexpr", "friend", "extern"}


def _words(tokens, first, last):
    return [token.text for token in tokens[first:last] if token.text not in _IRRELEVANT]


def _type_words(program, first, last):
    """The words of a parameter without its name and default; `const T` and `T const` read the same."""
    tokens, name_at = program.tokens, program.declarator_name(first, last)
    end = next((i for i in range(first, last) if tokens[i].text == "="), last)
    words = [tokens[i].text for i in range(first, end) if i != name_at and tokens[i].text]
    for i in range(len(words) - 1):
        if words[i + 1] == "const" and words[i] not in ("*", "&", "const"):
            words[i], words[i + 1] = words[i + 1], words[i]
    return [word for word in words if word != "typename"]
