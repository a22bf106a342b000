"""Declarations that differed in address spaces only, and are the same once these are erased."""

from ..errors import error_at
from .declarators import SPACES
from .rewrite import erase


def drop_duplicates(program, originals, kinds=("function", "class", "variable"), *, must_agree=False):
    """Drops functions, members and specializations that differed from an earlier one in address spaces only.

    Args:
        originals: the text of each token before address spaces were erased.
        kinds: the kinds of declarations to look at.
        must_agree: raise an MSLError where a dropped declaration has another content than the one that stays.
    """
    seen = {}
    for declaration in program.walk():
        key = declaration_key(program, declaration) if declaration.kind in kinds else None
        if key is None:
            continue
        original = [word for word in originals[declaration.first : _signature_end(declaration)] if word in SPACES]
        first, known = seen.setdefault(key, (declaration, original))
        if known != original:
            if must_agree and _content(program, first) != _content(program, declaration):
                at = [program.tokens[d.name_at or d.first] for d in (first, declaration)]
                raise error_at(
                    at[1],
                    f"'{declaration.name}' differs from the one at {at[0].file}:{at[0].line} in "
                    "address spaces only, which is supported where both say the same",
                )
            erase(program.tokens, declaration.first, declaration.last)


def _content(program, declaration):
    names = template_names(program, declaration)
    words = _words(program.tokens, _signature_end(declaration), declaration.last)
    return [names.get(word, word) for word in words]


def _signature_end(declaration):
    if declaration.kind == "class":
        return declaration.body[0]
    return declaration.body[0] if declaration.body else declaration.last


def declaration_key(program, declaration):
    tokens = program.tokens
    if declaration.kind == "function":
        if (
            declaration.body is None
            and not declaration.in_class
            and tokens[declaration.last - 2].text not in ("delete", "default")
        ):
            return None
        opening, closing = declaration.parameters
        parts = [_words(tokens, declaration.head, declaration.name_at), [declaration.name]]
        parts.append(_words(tokens, declaration.name_at, opening))
        for first, last in program.split_parameters(opening, closing):
            parts.append(_type_words(program, first, last))
        end = next(
            (i for i in range(closing, declaration.last) if tokens[i].text in ("{", ":", ";", "=")), declaration.last
        )
        parts.append(_words(tokens, closing + 1, end))
    elif declaration.kind == "class":
        if not declaration.is_template:
            return None
        parts = [_words(tokens, declaration.head, declaration.body[0])]
    elif declaration.kind == "variable" and declaration.is_template:
        end = next(
            (i for i in range(declaration.head, declaration.last) if tokens[i].text in ("=", "{", ";")),
            declaration.last,
        )
        parts = [_words(tokens, declaration.head, end)]
    else:
        return None
    names = template_names(program, declaration)
    header = [_words(tokens, opening, closing) for opening, closing in declaration.templates]
    return (
        declaration.kind,
        declaration.scope,
        id(declaration.owner),
        tuple(tuple(names.get(word, word) for word in part) for part in header + parts),
    )


def template_names(program, declaration):
    """Returns {name of each parameter of the declaration's templates: the word that stands for it in comparisons}."""
    names = {}
    for opening, closing in declaration.templates:
        for first, last in program.split_parameters(opening, closing):
            name = _template_parameter_name(program.tokens, first, last)
            if name is not None:
                names[name] = f"${len(names)}"
    return names


def signature_words(program, declaration):
    """Returns ([the words of each parameter's type], [the words of each template's parameters]), as template_names()
    has them."""
    names, tokens = template_names(program, declaration), program.tokens
    types = [_type_words(program, *part) for part in program.split_parameters(*declaration.parameters)]
    header = [_words(tokens, opening, closing) for opening, closing in declaration.templates]
    named = [[[names.get(word, word) for word in words] for words in part] for part in (types, header)]
    return [words for words in named[0] if words != ["void"]], named[1]


def _template_parameter_name(tokens, first, last):
    end = next((i for i in range(first, last) if tokens[i].text == "="), last)
    named = end - first > 1 and tokens[end - 1].kind == "id" and tokens[end - 2].text != "::"
    return tokens[end - 1].text if named else None


_IRRELEVANT = {"", "inline", "static", "METAL_FUNC", "constexpr", "friend", "extern"}


def _words(tokens, first, last):
    return [token.text for token in tokens[first:last] if token.text not in _IRRELEVANT]


def _type_words(program, first, last):
    """Returns the words of a parameter without its name and default; `const T` and `T const` read the same."""
    tokens, name_at = program.tokens, program.declarator_name(first, last)
    end = next((i for i in range(first, last) if tokens[i].text == "="), last)
    words = [tokens[i].text for i in range(first, end) if i != name_at and tokens[i].text]
    for i in range(len(words) - 1):
        if words[i + 1] == "const" and words[i] not in ("*", "&", "const"):
            words[i], words[i + 1] = words[i + 1], words[i]
    return [word for word in words if word != "typename"]
