"""The C preprocessor of MSL: pcpp with Apple's predefined macros, giving tokens that know their file and line.

pcpp lacks `__has_include`, `__VA_OPT__`, `#import` and `#elifdef`: they are added here.
"""

import copy
import io
import itertools
import os
import re
from typing import Any, NoReturn

import pcpp

from ..errors import MSLError
from .arithmetic import OPERATOR_WORDS, ArithmeticFailure, evaluate
from .numbers import MAX_INCLUDE_DEPTH
from .tokens import Lexer, LexToken, Token, lexed, refuse_deep_nesting, tokenize

# The macros that Apple's compiler predefines for `-std=metal3.1` on a Mac.
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
    "__FLT16_MAX__": "65504.0h",  # GCC's own has a suffix that MSL does not have
    "__has_attribute(x)": "1",
    "__has_builtin(x)": "0",
    "__has_feature(x)": "0",
    "__has_extension(x)": "0",
    "__has_cpp_attribute(x)": "1",
}

# `<metal_stdlib>` and every header that it includes. Translated code gets all of them from its target's prelude.h.
STANDARD_HEADERS = frozenset(
    "metal_" + name
    for name in (
        "stdlib algorithm array atomic cmath color command_buffer common compute config complex curves depth "
        "extended_vector function_constant geometric graphics imageblocks integer initializer_list interpolate limits "
        "logging math matrix mesh numeric numeric_limits pack packing pixel pull_model quadgroup raster_order_group "
        "raytracing reference_wrapper relational simdgroup simdgroup_matrix stdint stdlib_extras tessellation texture "
        "tuple type_traits types uniform utility vector visible_function_table work_distribution assert barrier "
        "performance_primitives"
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


# Headers of Metal 4 that declare tensors and operations on them. Translated code gets all of them where a program
# includes one.
TENSOR_HEADERS = frozenset(
    (
        "metal_tensor",
        "metal_cooperative_tensor",
        "MetalPerformancePrimitives/MetalPerformancePrimitives.h",
        "MetalPerformancePrimitives/MPPTensorOpsMatMul2d.h",
    )
)

_INCLUSIONS = 5_000
# How many tokens macros may expand to, with every nested expansion counted: this many, and more for each character.
# MLX's quantized.metal makes 1.5 million tokens of 300,000 characters.
_EXPANSION = 400_000
_EXPANSION_BY_CHARACTER = 32
_BLANKS = ("CPP_WS", "CPP_LINECONT", "CPP_COMMENT1", "CPP_COMMENT2")
_NAMES_A_MACRO = ("define", "undef", "ifdef", "ifndef")
_WANTED = {"if": "an expression", "elif": "an expression", "include": "the name of a file"}


class _Preprocessor(pcpp.Preprocessor):
    lastdirective: Any  # the token of the directive that is read

    def __init__(self, include_dirs, filename):
        self._inclusions = 0
        self._expansion = _EXPANSION  # how many tokens macros may still expand to
        super().__init__(Lexer())
        self.included = {}  # path -> content of every file read
        self.tensors = None  # (file, line) of the first #include of one of TENSOR_HEADERS
        self._importing = False
        self._expanding_in = filename
        self._has_else = []  # for each open #if, whether its #else has been read
        for directory in include_dirs:
            self.add_path(os.fspath(directory))
        # Messages name files by their absolute paths, and the program by the name that it was given.
        self.rewrite_paths = [(re.escape(os.path.abspath(filename)) + "$", lambda match: filename)]

    # Errors carry the user's line and end the translation.
    def on_error(self, file, line, msg) -> NoReturn:
        raise MSLError(f"{file}:{line}: error: {msg}")

    def on_include_not_found(self, is_malformed, is_system_include, curdir, includepath):
        directive = self.lastdirective
        if includepath in TENSOR_HEADERS and self.tensors is None:
            self.tensors = directive.source, directive.lineno
        if includepath in STANDARD_HEADERS | TENSOR_HEADERS:
            raise pcpp.OutputDirective(pcpp.Action.IgnoreAndRemove)
        raise MSLError(f"{directive.source}:{directive.lineno}: error: '{includepath}' file not found")

    def on_directive_unknown(self, directive, toks, ifpassthru, precedingtoks):
        text = "".join(token.value for token in toks)
        if directive.value == "error":
            self.on_error(directive.source, directive.lineno, f"#error {text}")
        elif directive.value == "pragma" and text.split()[:1] == ["METAL"]:
            pass  # such as fp math_mode: the host's math is always precise
        elif directive.value not in ("pragma", "warning", "line", "ident"):
            self.on_error(directive.source, directive.lineno, f"invalid preprocessing directive '#{directive.value}'")
        return True

    def on_directive_handle(self, directive, toks, ifpassthru, precedingtoks):
        name = directive.value
        if name in ("if", "ifdef", "ifndef"):
            self._has_else.append(False)
        elif name in ("elif", "else") and self._has_else:
            if self._has_else[-1]:
                self.on_error(directive.source, directive.lineno, f"#{name} after #else")
            self._has_else[-1] = name == "else"
        elif name == "endif" and self._has_else:
            self._has_else.pop()
        if name in _NAMES_A_MACRO and (not toks or toks[0].type != "CPP_ID"):
            self.on_error(directive.source, directive.lineno, f"#{name} wants the name of a macro")
        if name in ("if", "elif", "include") and not toks:
            self.on_error(directive.source, directive.lineno, f"#{name} wants {_WANTED[name]}")
        return super().on_directive_handle(directive, toks, ifpassthru, precedingtoks)

    def on_unknown_macro_in_defined_expr(self, tok):
        return tok.value == "__has_include"

    def on_file_open(self, is_system_include, includepath) -> Any:
        if os.path.isdir(includepath):
            raise OSError(includepath)
        self._inclusions += 1
        if self.include_depth > MAX_INCLUDE_DEPTH:
            self.on_error(self.lastdirective.source, self.lastdirective.lineno, "#include nested too deeply")
        if self._inclusions > _INCLUSIONS:
            self.on_error(self.lastdirective.source, self.lastdirective.lineno, "too many files are included")
        with open(includepath, encoding="utf-8-sig", errors="replace") as file:
            self.included[includepath] = file.read()
        self.allow_expansion_of(self.included[includepath])
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
            elif directive in ("elifdef", "elifndef"):
                words[1].value = "elif"
                at, test = line.index(words[1]) + 1, " defined" if directive == "elifdef" else " !defined"
                line = [*line[:at], *lexed(test, words[1]), *line[at:]]
            elif directive == "pragma":
                text = "".join(t.value for t in line if not t.type.startswith("CPP_COMMENT")).split("pragma", 1)[1]
                if not text.strip():
                    line = [token for token in line if "\n" in token.value]
                elif unrolls := _unroll(text):
                    line = [*lexed(unrolls, words[0]), *(token for token in line if "\n" in token.value)]
            yield line

    def place(self):
        """Returns (file, line) of the macro that is being expanded."""
        return self._expanding_in, self.linemacro

    def allow_expansion_of(self, text):
        self._expansion += _EXPANSION_BY_CHARACTER * len(text)

    def expand_macros(self, tokens, expanding_from=()):
        if self.linemacrodepth == 0 and tokens:
            self._expanding_in = tokens[0].source
        expanded = super().expand_macros(tokens, list(expanding_from))
        if expanding_from:
            self._expansion -= len(expanded)
            if self._expansion < 0:
                self.on_error(*self.place(), "the macros of this line expand to too many tokens")
        return expanded

    def evalexpr(self, tokens):
        """Returns (the value of the expression of an #if or #elif, None)."""
        at = self.lastdirective
        tokens = [token for token in tokens if token.type not in _BLANKS]
        # A macro may expand to a `defined`, whose operand is not expanded.
        tokens = self.expand_macros(self._answered(tokens))
        words = [token.value for token in self._answered([t for t in tokens if t.type not in _BLANKS])]
        for word, following in itertools.pairwise(words):
            if following == "(" and re.fullmatch(r"[A-Za-z_$][\w$]*", word) and word not in OPERATOR_WORDS:
                self.on_error(at.source, at.lineno, f"#{at.value}: the function-like macro '{word}' is not defined")
        try:
            return evaluate(words, lambda name: 0).value, None
        except ArithmeticFailure as failure:
            self.on_error(at.source, at.lineno, f"#{at.value} {' '.join(words)}: {failure}")

    def _answered(self, tokens):
        """Returns tokens of an expression with `1` or `0` in the place of each `defined` and `__has_include`."""
        answered, i = [], 0
        while i < len(tokens):
            token = tokens[i]
            if token.value in ("defined", "__has_include"):
                asked, i = self._asked(tokens, i)
                answer = self._is_defined(asked) if token.value == "defined" else self._is_there(asked)
                token = copy.copy(token)
                token.type, token.value = "CPP_INTEGER", str(int(answer))
            else:
                i += 1
            answered.append(token)
        return answered

    def _asked(self, tokens, i):
        """Returns (the operand of the operator at i, the index after it)."""
        operator, i, values = tokens[i], i + 1, [token.value for token in tokens]
        if operator.value == "defined" and values[i : i + 1] != ["("]:
            if i < len(tokens) and tokens[i].type == "CPP_ID":
                return values[i], i + 1
        elif values[i : i + 1] == ["("] and ")" in values[i:]:
            close = values.index(")", i)
            if operator.value != "defined" or close == i + 2 and tokens[i + 1].type == "CPP_ID":
                return "".join(values[i + 1 : close]), close + 1
        wanted = "the name of a macro" if operator.value == "defined" else "the name of a file in parentheses"
        self.on_error(operator.source, operator.lineno, f"'{operator.value}' wants {wanted}")

    def _is_defined(self, name):
        return name in self.macros or self.on_unknown_macro_in_defined_expr(LexToken("CPP_ID", name, 0, 0))

    def _is_there(self, name):
        paths = self.path if name.startswith("<") else self.temp_path + self.path
        name = name.strip('<>"')
        if name in STANDARD_HEADERS | TENSOR_HEADERS:
            return True
        return any(os.path.isfile(os.path.join(path, name)) for path in paths)

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
    """Returns the macro that replaces a pragma about unrolling a loop: MSL_UNROLL or MSL_UNROLL_BY(n)."""
    match = re.fullmatch(r"\s*(?:clang\s+loop\s+)?(nounroll|unroll)\s*(?:\(?\s*(\w+)\s*\)?)?\s*", pragma)
    if not match or match[2] == "enable":
        return None
    count = "1" if match[1] == "nounroll" or match[2] == "disable" else match[2]
    return "MSL_UNROLL" if count in (None, "full") else f"MSL_UNROLL_BY({count})"


def preprocess(source, *, include_dirs=(), filename="program_source", defines=()):
    """Returns tokens of `source` with every macro expanded, and the files it includes.

    Args:
        source: MSL text.
        include_dirs: directories in which `#include` looks, in order.
        filename: the name of `source` in errors.
        defines: macros as ``NAME value`` strings.

    Returns:
        (list of Token, dict from the path of each included file to its content, (file, line) of the first #include of
        one of TENSOR_HEADERS or None).

    Raises:
        MSLError: a directive is malformed, a header is missing, or `#error` is reached.
    """
    preprocessor = _Preprocessor(include_dirs, filename)
    for name, value in PREDEFINED.items():
        preprocessor.define(f"{name} {value}")
    for definition in defines:
        preprocessor.define(definition)
    directory = os.path.dirname(filename)
    preprocessor.allow_expansion_of(source)
    preprocessor.parse(source, filename)
    preprocessor.temp_path = [directory] if directory else []
    tokens, space = [], ""
    while (token := _next(preprocessor)) is not None:
        value = token.value
        if token.type == "CPP_WS" or token.type == "CPP_LINECONT":
            space = "" if "\n" in value else space + value
            continue
        kind = {"CPP_ID": "id", "CPP_STRING": "str", "CPP_CHAR": "char", "CPP_INTEGER": "num", "CPP_FLOAT": "num"}
        tokens.append(Token(kind.get(token.type, "op"), str(value), token.lineno, token.source, space))
        space = ""
    tokens = _without_pragma_operators(tokens)
    refuse_deep_nesting(tokens)
    return tokens, preprocessor.included, preprocessor.tensors


def _next(preprocessor):
    try:
        return preprocessor.token()
    except RecursionError:  # Python's limit depends on the depth of the caller
        preprocessor.on_error(*preprocessor.place(), "macros or headers are nested too deeply")


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
