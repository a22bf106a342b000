"""Programs with a random declaration, and its meaning: whether the threads share what it declares.

The meaning is made with the declaration, from the same choices and without the front end.

Each program gives the right result or is refused with its line. METALCORE_FUZZ_SEED sets the first seed,
METALCORE_FUZZ_CASES the number of programs.
"""

import os
import random
import re
from dataclasses import dataclass

import pytest
import torch

import metalcore
from metalcore.msl.errors import MSLError
from metalcore.msl.language.translate import translate

THREADS = 4
# (type, an lvalue of float in an object `x` of it)
_TYPES = [
    ("float", "{x}"), ("metal::float4", "{x}.y"), ("float2", "{x}[1]"), ("Pair", "{x}.b"), ("struct Pair", "{x}.a"),
    ("Box<float>", "{x}.v"), ("Box<Box<float>>", "{x}.v.v"), ("inner::Pair", "{x}.b"), ("One<float>::type", "{x}"),
    ("struct {{ float p; int q; }}", "{x}.p"), ("struct Named{n} {{ int q; float p; }}", "{x}.p"),
    ("union {{ float p; uint q; }}", "{x}.p"), ("union {{ struct {{ float p; float r; }}; float2 s; }}", "{x}.r"),
    ("Alias", "{x}"), ("decltype(1.0f)", "{x}"), ("metal::array<float, 3>", "{x}[2]"),
]  # fmt: skip
_ALIGNMENTS = ["__attribute__((aligned(16)))", "alignas(16)", "alignas(float4)", "__attribute__((aligned(32), unused))"]
_HARMLESS = ["[[maybe_unused]]", "__attribute__((unused))"]
PRELUDE = """#include <metal_stdlib>
using namespace metal;
struct Pair { float a, b; };
namespace inner { struct Pair { int a; float b; }; }
template <typename T> struct Box { T v; };
template <typename T, int N> struct Holder { T v[N]; };
template <typename T> struct One { typedef T type; };
typedef float Alias;
constant constexpr int kTwo = 2;
"""


@dataclass
class Case:
    before: str  # at program scope
    declaration: str
    block: str  # the rest of the block, which stores what each thread i reads in out[i]
    shared: bool  # whether all threads see what the last thread has written


def case(seed):
    return _Maker(seed).make()


def program(kernels):
    """(a program of kernels k0, k1 …, each with the blocks of a list of cases; the line of its last declaration)."""
    source = PRELUDE + "".join(one.before for cases in kernels for one in cases)
    for n, cases in enumerate(kernels):
        source += f"kernel void k{n}(device float* out, uint i [[thread_index_in_threadgroup]]) {{\n"
        for one in cases:
            line = source.count("\n") + 1
            source += f"{{ {one.declaration}\n{one.block} }}\nout += {THREADS};\n"
        source += "}\n"
    return source, line


class _Maker:
    def __init__(self, seed):
        self.seed = seed
        self.choose = random.Random(seed)
        self.before = ""  # declarations at program scope
        self.after = ""  # statements after the declaration

    def chance(self, probability):
        return self.choose.random() < probability

    def make(self):
        shared = self.chance(0.7)
        space = "threadgroup" if shared else self.choose.choice(["thread", ""])
        type_, element = self.choose.choice(_TYPES)
        type_ = type_.format(n=self.seed)
        make = self.choose.choice([self.plain, self.plain, self.plain, self.alias, self.pointer, self.template])
        text, element = make(space, type_, element)
        if self.chance(0.2):
            text = f"{{ }} {text}"
        if self.chance(0.15):
            self.after = "{ int x; (void)x; }\n" + self.after
        block = f"""{self.after}{element} = -1;
threadgroup_barrier(mem_flags::mem_threadgroup);
if (i == {THREADS - 1}) {element} = 5;
threadgroup_barrier(mem_flags::mem_threadgroup);
out[i] = {element};"""
        return Case(self.before, text, block, shared)

    # Parts of declarations ------------------------------------------------------------------------------------------

    def specifiers(self, space, type_):
        """The words before the declarator, in an order that C++ allows."""
        words = [word for word in (space, type_) if word]
        if self.chance(0.3):
            words.reverse()
        if words[-1] == space and type_.endswith("}"):
            words.reverse()  # Clang accepts no word after a class's body
        if self.chance(0.2):
            words.insert(0, "volatile" if "struct" not in type_ and type_ in ("float", "Alias") else "")
        if space and self.chance(0.4):
            words.insert(0, self.choose.choice(_ALIGNMENTS))
        if self.chance(0.15):
            words.insert(0, self.choose.choice(_HARMLESS))
        if space == "threadgroup" and self.chance(0.1):
            words.insert(0, "static")
        return " ".join(word for word in words if word)

    def declarator(self, name, element, alignment=True):
        """(text, the element of it): parentheses, arrays, attributes."""
        text, extents = name, self.choose.choice(["", "", "[3]", "[kTwo + 1]", "[2][3]", "[(kTwo > 1 ? 3 : 1)]"])
        if self.chance(0.25):
            text = f"({text})" if self.chance(0.7) else f"(({text}))"
        elif alignment and self.chance(0.15):
            text += " alignas(16) "
        text += extents
        if alignment and self.chance(0.15):
            text += " __attribute__((aligned(16)))"
        return text, element.format(x=name + "[1]" * extents.count("["))

    # Kinds of declarations ------------------------------------------------------------------------------------------

    def plain(self, space, type_, element):
        first, result = self.declarator("x", element)
        declarators = [first]
        if self.chance(0.4):
            declarators.insert(self.choose.randrange(2), self.declarator("y", "{x}")[0])
        if space and self.chance(0.2):
            declarators.append("*z")
        return f"{self.specifiers(space, type_)} {', '.join(declarators)};", result

    def alias(self, space, type_, element):
        first, *more = (f"{letter}{self.seed}" for letter in "TUV")
        declarator, result = self.declarator(first, element, alignment=False)
        result = result.replace(first, "x")
        words = " ".join(word for word in (space, type_) if word)
        if self.chance(0.5):
            text = f"typedef {words} {declarator};"
        else:
            text, result = f"using {first} = {words};", element.format(x="x")
        name = first
        if self.chance(0.3):
            for name in more:
                text += f" typedef {first} {name};"
                first = name
        use = f"{name} x;" if self.chance(0.6) else f"{name} x, y[2];"
        if self.chance(0.5):
            self.before = text + "\n"
            return use, result
        return f"{text} {use}", result

    def pointer(self, space, type_, element):
        """A pointer that may be in threadgroup memory itself, and always points to it."""
        if type_.startswith(("struct {", "union", "struct Named")):
            type_, element = "float", "{x}"
        extents = self.choose.choice(["", "[2]"])
        at = "p[1]" if extents else "p"
        word = space or ""
        # Each thread points to another element. If the pointer is shared, the last thread's stays.
        self.after = (
            f"{at} = &all[i];\nthreadgroup_barrier(mem_flags::mem_threadgroup);\n"
            f"if (i == {THREADS - 1}) {at} = &all[i];\nthreadgroup_barrier(mem_flags::mem_threadgroup);\n"
        )
        spell = f"threadgroup {type_}*" if self.chance(0.6) else f"{type_} threadgroup*"
        text = f"threadgroup {type_} all[{THREADS}]; {spell} {word} p{extents};"
        return text, element.format(x=f"(*{at})")

    def template(self, space, type_, element):
        """A declaration whose type has arguments that look like comparisons."""
        if type_.startswith(("struct {", "union", "struct Named")):
            type_, element = "float", "{x}"
        words = self.specifiers(space, f"Holder<{type_}, (3 > kTwo ? 4 : 2)>")
        declarator, _ = self.declarator("x", "{x}")
        index = "[1]" * declarator.split("__attribute__")[0].count("[")
        return f"{words} {declarator};", element.format(x=f"x{index}.v[2]")


SEED = int(os.environ.get("METALCORE_FUZZ_SEED", "0"))
CASES = int(os.environ.get("METALCORE_FUZZ_CASES", "384"))
PER_KERNEL, KERNELS = 12, 4  # cases and kernels that are compiled together
PER_PROGRAM = PER_KERNEL * KERNELS
pytestmark = pytest.mark.usefixtures("compiles_for_cuda")


def accepted(seeds):
    """{seed: case} of the cases that are not refused. The refusal of another case must name one of its lines."""
    cases = {seed: case(seed) for seed in seeds}
    return {seed: one for seed, one in cases.items() if not is_refused(seed, one)}


def is_refused(seed, one):
    source, line = program([[one]])
    refusal = None
    try:
        translate(source)
    except MSLError as error:
        refusal = str(error)
    if refusal:
        named = int(re.match(r"program_source:(\d+): error: \S", refusal)[1])
        assert PRELUDE.count("\n") < named <= line, f"seed {seed}: {refusal}\n{source}"
    return refusal is not None


@pytest.mark.parametrize("first", range(SEED, SEED + CASES, PER_PROGRAM))
def test_random_declarations(device, first):
    cases = accepted(range(first, first + PER_PROGRAM))
    assert len(cases) > PER_PROGRAM * 0.9  # refusals are the exception
    seeds = list(cases)
    kernels = [seeds[i : i + PER_KERNEL] for i in range(0, len(seeds), PER_KERNEL)]
    library = metalcore.compile_shader(program([[cases[seed] for seed in part] for part in kernels])[0])
    for n, part in enumerate(kernels):
        out = torch.zeros(len(part), THREADS, device=device)
        getattr(library, f"k{n}")(out, threads=THREADS, group_size=THREADS)
        for seed, row in zip(part, out.tolist()):
            # The last thread writes 5. The others see it if the variable is shared, and else their own -1.
            expected = [5 if cases[seed].shared else -1] * (THREADS - 1) + [5]
            assert row == expected, f"seed {seed}\n{program([[cases[seed]]])[0]}"
