"""The C preprocessor of MSL: pcpp with Apple's predefined macros, giving tokens that know their file and line.

What pcpp lacks is added here: `__has_include`, `__VA_OPT__`, `#import`, and a lexer that knows C++ numbers and
operators (pcpp's own splits ``1.f`` and would expand a macro named ``f`` in it).
"""

import copy
import io
import os
import re

import pcpp

from .errors import MSLError
from .tokens import LEXICAL, Token, tokenize

# What Apple's compiler predefines for `-std=metal3.1` on a Mac.
PREDEFINED = {
    "__METAL__": "1",
    "__METAL_VERSION__": "310",
    "__METAL_MACOS__": "1",
    "__METAL_MEMORY_SCOPE_SYSTEM__": "3",
    "__HAVE_BFLOAT__": "1",
    "__HAVE_SIMDGROUP_MATRIX__": "1",
    "__HAVE_SIMDGROUP_BARRIER__": "1",
    "__HAVE_SIMDGROUP_REDUCTION__": "1",
    "__HAVE_QUADGROUP_FUNCTION__": "1",
    "__HAVE_ATOMIC_ULONG__": "1",
    "__HAVE_ATOMIC_ULONG_MIN_MAX__": "1",
    "__HAVE_NATIVE_INT64__": "1",
    "__APPLE__": "1",
    "__MACH__": "1",
    "__ENVIRONMENT_MAC_OS_X_VERSION_MIN_REQUIRED__": "140000",
    "__LITTLE_ENDIAN__": "1",
    "__clang__": "1",
    "__clang_major__": "17",
    "__clang_minor__": "0",
    "__clang_patchlevel__": "0",
    "__GNUC__": "4",
    "__GNUC_MINOR__": "2",
    "__cplusplus": "201703L",
    "__CHAR_BIT__": "8",
    "__has_attribute(x)": "1",
    "__has_builtin(x)": "0",
    "__has_feature(x)": "0",
    "__has_extension(x)": "0",
    "__has_cpp_attribute(x)": "1",
}

# `<metal_stdlib>` and every header it is made of; the translated code gets them all from host/prelude.h.
STANDARD_HEADERS = frozenset(
    "metal_" + name
    for name in (
        "stdlib algorithm array atomic cmath color command_buffer common compute config complex curves depth "
        "extended_vector function_constant geometric graphics imageblocks integer initializer_list interpolate limits "
        "logging math matrix mesh numeric numeric_limits pack packing pixel pull_model quadgroup raster_order_group "
        "raytracing reference_wrapper relational simdgroup simdgroup_matrix stdint stdlib_extras tessellation texture "
        "tuple type_traits types uniform utility vector visible_function_table work_distribution assert barrier "
        "cooperative_tensor tensor performance_primitives"
    ).split()
) | {
    "simd/simd.h",
    "simd/types.h",
    "simd/vector_types.h",
    "simd/matrix_types.h",
    "simd/vector.h",
    "simd/matrix.h",
    "metal_types",
    "TargetConditionals.h",
    "stdint.h",
    "cstdint",
    "stddef.h",
    "cstddef",
    "limits.h",
    "float.h",
}

_TYPES = {
    "ws": "CPP_WS",
    "newline": "CPP_WS",
    "continuation": "CPP_LINECONT",
    "id": "CPP_ID",
    "str": "CPP_STRING",
    "delimiter": "CPP_STRING",
    "char": "CPP_CHAR",
}
_OPERATORS = {
    "#": "POUND", "##": "DPOUND", "+": "PLUS", "-": "MINUS", "*": "STAR", "/": "FSLASH", "%": "PERCENT", "|": "BAR",
    "&": "AMPERSAND", "~": "TILDE", "^": "HAT", "<": "LESS", ">": "GREATER", "=": "EQUAL", "!": "EXCLAMATION",
    "?": "QUESTION", "(": "LPAREN", ")": "RPAREN", "[": "LBRACKET", "]": "RBRACKET", "{": "LCURLY", "}": "RCURLY",
    ".": "DOT", ",": "COMMA", ";": "SEMICOLON", ":": "COLON", "\\": "BSLASH", "->": "DEREFERENCE", "-=": "MINUSEQUAL",
    "--": "MINUSMINUS", "<<": "LSHIFT", "<=": "LESSEQUAL", ">>": "RSHIFT", ">=": "GREATEREQUAL", "||": "LOGICALOR",
    "|=": "OREQUAL", "&&": "LOGICALAND", "&=": "ANDEQUAL", "==": "EQUALITY", "!=": "INEQUALITY", "^=": "XOREQUAL",
    "*=": "MULTIPLYEQUAL", "/=": "DIVIDEEQUAL", "+=": "PLUSEQUAL", "++": "PLUSPLUS", "%=": "PERCENTEQUAL",
    "<<=": "LSHIFTEQUAL", ">>=": "RSHIFTEQUAL",
}  # fmt: skip


class _LexToken:
    """What pcpp reads of a token; `expanded_from` is added by pcpp."""

    def __init__(self, type, value, lineno, lexpos):
        self.type, self.value, self.lineno, self.lexpos = type, value, lineno, lexpos


class _Lexer:
    """Stands in for pcpp's PLY lexer, over the pattern that the rest of the front end uses."""

    def __init__(self):
        self.lineno = 1

    def clone(self):
        return copy.copy(self)

    def input(self, text):
        self.lineno = 1
        self._matches = LEXICAL.finditer(text)

    def token(self):
        match = next(self._matches, None)
        if match is None:
            return None
        kind, text = match.lastgroup, match.group()
        if kind in _TYPES:
            type = _TYPES[kind]
            if kind == "continuation":
                text = text[1:-1]
        elif kind == "op":
            type = "CPP_" + _OPERATORS.get(text, "OTHER")
        elif kind == "num":
            type = "CPP_INTEGER" if text.rstrip("uUlL").isalnum() else "CPP_FLOAT"
        else:
            type = "CPP_COMMENT1" if text.startswith("/*") else "CPP_COMMENT2"
        token = _LexToken(type, text, self.lineno, match.start())
        self.lineno += match.group().count("\n")
        return token


class _Preprocessor(pcpp.Preprocessor):
    def __init__(self, include_dirs, filename):
        super().__init__(_Lexer())
        self.included = {}  # path -> content of every file read
        self._importing = False
        for directory in include_dirs:
            self.add_path(os.fspath(directory))
        # Files are called by their absolute paths, the program by the name it was given.
        self.rewrite_paths = [(re.escape(os.path.abspath(filename)) + "$", lambda match: filename)]

    # Errors carry the user's line and end the translation.
    def on_error(self, file, line, message):
        raise MSLError(f"{file}:{line}: error: {message}")

    def on_include_not_found(self, is_malformed, is_system_include, curdir, includepath):
        if includepath in STANDARD_HEADERS:
            raise pcpp.OutputDirective(pcpp.Action.IgnoreAndRemove)
        directive = self.lastdirective
        if includepath.startswith("MetalPerformancePrimitives"):
            self.on_error(
                directive.source, directive.lineno, "Metal Performance Primitives (mpp::) are not supported"
            )
        raise MSLError(f"{directive.source}:{directive.lineno}: error: '{includepath}' file not found")

    def on_directive_unknown(self, directive, tokens, ifpassthru, precedingtoks):
        text = "".join(token.value for token in tokens)
        if directive.value == "error":
            self.on_error(directive.source, directive.lineno, f"#error {text}")
        elif directive.value == "pragma" and text.split()[:1] == ["METAL"]:
            pass  # fp math_mode and the like: the host always computes as precise
        elif directive.value not in ("pragma", "warning", "line", "ident"):
            self.on_error(directive.source, directive.lineno, f"invalid preprocessing directive '#{directive.value}'")
        return True

    def on_directive_handle(self, directive, tokens, ifpassthru, precedingtoks):
        if directive.value in ("if", "elif"):
            self._answer_has_include(tokens)
        return super().on_directive_handle(directive, tokens, ifpassthru, precedingtoks)

    def on_file_open(self, is_system_include, includepath):
        if os.path.isdir(includepath):
            raise OSError(includepath)
        with open(includepath, encoding="utf-8-sig", errors="replace") as file:
            self.included[includepath] = file.read()
        if self._importing:
            self.include_once[includepath] = None
            self._importing = False
        return io.StringIO(self.included[includepath])

    def group_lines(self, input, abssource):
        for line in super().group_lines(input, abssource):
            words = [token for token in line[:6] if token.type != "CPP_WS"][:2]
            directive = words[1].value if len(words) == 2 and words[0].value == "#" else None
            if directive == "import":
                words[1].value = "include"
                self._importing = True
            elif directive == "pragma":
                text = "".join(t.value for t in line if not t.type.startswith("CPP_COMMENT")).split("pragma", 1)[1]
                if unrolls := _unroll(text):
                    line = [*_lexed(unrolls, words[0]), *(token for token in line if "\n" in token.value)]
            yield line

    def _answer_has_include(self, tokens):
        i = 0
        while i < len(tokens):
            if tokens[i].value == "__has_include":
                close = next((j for j in range(i, len(tokens)) if tokens[j].value == ")"), None)
                if close is None:
                    self.on_error(tokens[i].source, tokens[i].lineno, "missing ')' after '__has_include'")
                name = "".join(token.value for token in tokens[i + 1 : close]).strip("( \t")
                paths = self.path if name.startswith("<") else self.temp_path + self.path
                name = name.strip('<>"')
                found = name in STANDARD_HEADERS or any(os.path.isfile(os.path.join(path, name)) for path in paths)
                tokens[i].type, tokens[i].value = "CPP_INTEGER", str(int(found))
                del tokens[i + 1 : close + 1]
            i += 1

    def macro_expand_args(self, macro, args):
        if macro.variadic and any(token.value == "__VA_OPT__" for token in macro.value):
            macro = self._without_va_opt(macro, any(token.value.strip() for token in args[-1]))
        return super().macro_expand_args(macro, args)

    def _without_va_opt(self, macro, keep):
        value, i, body = [], 0, macro.value
        while i < len(body):
            if body[i].value == "__VA_OPT__":
                depth, start = 0, None
                while True:
                    i += 1
                    if body[i].value == "(":
                        depth += 1
                        start = i + 1 if start is None else start
                    elif body[i].value == ")":
                        depth -= 1
                        if depth == 0:
                            break
                if keep:
                    value += body[start:i]
            else:
                value.append(body[i])
            i += 1
        plain = pcpp.parser.Macro(macro.name, value, macro.arglist, macro.variadic)
        self.macro_prescan(plain)
        return plain


def _unroll(pragma):
    """What stands for a pragma about unrolling a loop in a translated program: MSL_UNROLL, or MSL_UNROLL_BY(n)."""
    match = re.fullmatch(r"\s*(?:clang\s+loop\s+)?(nounroll|unroll)\s*(?:\(?\s*(\w+)\s*\)?)?\s*", pragma)
    if not match or match[2] == "enable":
        return None
    count = "1" if match[1] == "nounroll" or match[2] == "disable" else match[2]
    return "MSL_UNROLL" if count in (None, "full") else f"MSL_UNROLL_BY({count})"


def _lexed(text, at):
    """pcpp's tokens of a text, at the place of another token."""
    lexer, tokens = _Lexer(), []
    lexer.input(text)
    while token := lexer.token():
        token.lineno, token.lexpos = at.lineno, at.lexpos
        if hasattr(at, "source"):
            token.source = at.source
        tokens.append(token)
    return tokens


def preprocess(source, *, include_dirs=(), filename="program_source", defines=()):
    """Tokens of `source` with every macro expanded, and the files it includes.

    Args:
        source: MSL text.
        include_dirs: where `#include` looks, in order.
        filename: how error messages call `source`.
        defines: macros as ``NAME value`` strings.

    Returns:
        (list of Token, dict from the path of each included file to its content).

    Raises:
        MSLError: a directive is malformed, a header is missing, or `#error` is reached.
    """
    preprocessor = _Preprocessor(include_dirs, filename)
    for name, value in PREDEFINED.items():
        preprocessor.define(f"{name} {value}")
    for definition in defines:
        preprocessor.define(definition)
    directory = os.path.dirname(filename)
    preprocessor.parse(source, filename)
    preprocessor.temp_path = [directory] if directory else []
    tokens, space = [], ""
    while (token := preprocessor.token()) is not None:
        value = token.value
        if token.type == "CPP_WS" or token.type == "CPP_LINECONT":
            space = "" if "\n" in value else space + value
            continue
        kind = {"CPP_ID": "id", "CPP_STRING": "str", "CPP_CHAR": "char", "CPP_INTEGER": "num", "CPP_FLOAT": "num"}
        tokens.append(Token(kind.get(token.type, "op"), str(value), token.lineno, token.source, space))
        space = ""
    return _without_pragma_operators(tokens), preprocessor.included


def _without_pragma_operators(tokens):
    kept, i = [], 0
    while i < len(tokens):
        if tokens[i].text == "_Pragma":
            text = tokens[i + 2].text.strip('"') if i + 2 < len(tokens) else ""
            if unrolls := _unroll(text):
                kept += tokenize(unrolls, tokens[i].file, tokens[i].line)
            i += 4  # _Pragma ( "…" )
            continue
        kept.append(tokens[i])
        i += 1
    return kept
