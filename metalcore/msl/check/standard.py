"""The versions of MSL that a program may be checked as, and what is new in them."""

from ..language.rules import Breach

STANDARDS = {"metal3.1": 310, "metal3.2": 320, "metal4.0": 400}
# Functions of the standard library that are new have MSL_SINCE_3_2 in include/.
_WORDS = {"coherent": 320}
_ATTRIBUTES = {"required_threads_per_threadgroup": 400}


def version(standard):
    """__METAL_VERSION__ of a standard, such as 320 of "metal3.2"."""
    if standard not in STANDARDS:
        raise ValueError(f"the standard is {standard!r}, and must be one of {', '.join(STANDARDS)}")
    return STANDARDS[standard]


def standard_breaches(program, standard):
    """Yields breaches in a program's tokens that a newer version of MSL would accept."""
    attribute = 0
    for i, token in enumerate(program.tokens):
        attribute = max(attribute, program.attribute_end(i) or 0)
        since = (_ATTRIBUTES if i < attribute else _WORDS).get(token.text, 0)
        if since > version(standard):
            newer = f"{since // 100}.{since // 10 % 10}"
            yield Breach(i, "version", f"'{token.text}' is new in MSL {newer}, and the program is read as {standard}")
