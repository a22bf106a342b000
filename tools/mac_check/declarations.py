"""Compares our declarations of Foundation and Metal (sdk/*.h) with Apple's.

Ours are compiled, as protocols, into a bundle, whose metadata has the type encoding of every method. So are those that
the backend has for itself, of what only a newer macOS has. They are compared with three sources of Apple's:

- the protocols that Apple's compiler left in PyObjC's libraries: the same metadata, letter by letter;
- metal-cpp, Apple's C++ headers: selectors, and the types of the methods that send them;
- PyObjC's metadata, which is made from Apple's headers: enumerators and functions.
"""

import re

from ..build.places import ROOT
from . import CheckFailed
from .build import compiler, run
from .macho import MachO
from .sdk import HERE

_CLASS_PREFIX = "class_"
# A protocol <class>Since<version> of the backend's has methods of a newer macOS, and k<enumerator> is an enumerator's
# value.
_NEWER = "compile_options.mm"
_SINCE = re.compile(r"Since\d+$")


def check(sdk, downloads, work, headers=None):
    """Raises CheckFailed where a declaration differs from Apple's or Apple has none; returns a summary of the check.

    `headers` is the folder with the declarations; the default is our own.
    """
    headers = headers or HERE / "sdk"
    newer = next(folder / _NEWER for folder in (headers, ROOT / "csrc/backends/mps") if (folder / _NEWER).exists())
    text = "".join(path.read_text() for path in [*sorted(headers.glob("*.h")), newer])
    apple = _Apple(downloads)
    problems = []
    methods = exact = 0
    for owner, (_, ours) in sorted(_our_protocols(sdk, text, apple, problems, work).items()):
        for (kind, selector), encoding in sorted(ours.items()):
            methods += 1
            exact += owner in apple.protocols
            name = _SINCE.sub("", owner.removeprefix(_CLASS_PREFIX))
            problem = apple.method_problem(name, kind, selector, encoding)
            if problem:
                problems.append(f"{kind}[{name} {selector}] {problem}")
    functions = re.findall(r'extern "C" (?:.*?)(\w+)\(void\)', text)
    problems += [
        f"{name}(): Apple's headers have no such function that returns an object the caller owns"
        for name in functions
        if not apple.has_function(name)
    ]
    if problems:
        raise CheckFailed("declarations differ from Apple's:\n" + "\n".join(problems))
    return f"{methods} methods ({exact} in Apple's own metadata, the others in metal-cpp), {len(functions)} functions"


def _our_protocols(sdk, text, apple, problems, work):
    """Returns the metadata of our protocols, and of our classes as protocols; checks the enumerators on the way."""
    names = re.findall(r"@protocol (\w+)(?: <|\n)", text)
    probe = ["#import <Foundation/Foundation.h>", "#import <Metal/Metal.h>"]
    probe += re.findall(r"@protocol \w+Since\d+\n.*?@end", text, re.DOTALL)
    for name, body in re.findall(r"@interface (\w+) : NSObject\n(.*?)@end", text, re.DOTALL):
        probe.append(f"@protocol {_CLASS_PREFIX}{name} <NSObject>\n{body}@end")
        names.append(_CLASS_PREFIX + name)
    constants = re.findall(r"constexpr NSInteger k(MTL\w+) = (\d+);", text)
    for name, ours in [*((name, name) for name in re.findall(r"\b((?:NS|MTL)\w+) = ", text)), *constants]:
        if name not in apple.enumerators:
            problems.append(f"{name}: Apple's headers have no such enumerator")
        else:
            value = apple.enumerators[name]
            probe.append(f'static_assert({ours} == {value}, "{name} is {value} in Apple\'s headers");')
    probe.append(f"id probes[] = {{{', '.join(f'@protocol({name})' for name in names)}}};")
    source, bundle = work / "declarations.mm", work / "declarations.so"
    source.write_text("\n".join(probe) + "\n")
    run(
        [*compiler(sdk), "-std=c++20", "-bundle", "-Wl,-undefined,dynamic_lookup", str(source), "-o", str(bundle)],
        "our declarations do not compile, or differ from Apple's",
    )
    return {name: protocol for name, protocol in MachO(bundle).protocols().items() if name in names}


class _Apple:
    """The contents of Apple's headers, as far as the downloaded wheels tell them."""

    def __init__(self, downloads):
        self.protocols, self.enumerators, metadata = {}, {}, ""
        for project in ("pyobjc-framework-Cocoa", "pyobjc-framework-Metal"):
            for path in downloads.pinned[project].rglob("*.so"):
                self.protocols.update(MachO(path).protocols())
            for path in downloads.pinned[project].rglob("_metadata.py"):
                metadata += path.read_text()
        self._metadata = re.sub(r"\s+", "", metadata)
        self.enumerators = {name: int(value) for name, value in re.findall(r"\$(\w+)@(-?\d+)", metadata)}
        self._cpp = _metal_cpp(downloads.pinned["mlx-metal"] / "mlx" / "include" / "metal_cpp")

    def has_function(self, name):
        return f'"{name}":(b"@","",{{"retval":{{"already_cfretained":True}}}}' in self._metadata

    def method_problem(self, owner, kind, selector, encoding):
        """Says what is wrong with a method of ours; None if nothing."""
        if owner in self.protocols:
            apples = self._inherited(owner).get((kind, selector))
            if apples is None:
                return "is not in Apple's protocol"
            return None if apples == encoding else f"has the types {encoding}, Apple's {apples}"
        known = self._cpp.get((owner, selector))
        if known is None:
            return "is not in Apple's headers"
        ours = re.sub(r"\d+", "", encoding).replace("@:", "", 1)
        return None if ours in known else f"has the types {ours}, Apple's {' or '.join(sorted(known))}"

    def _inherited(self, name):
        supers, methods = self.protocols.get(name, ((), {}))
        for protocol in supers:
            methods = {**self._inherited(protocol), **methods}
        return methods


# metal-cpp ------------------------------------------------------------------------------------------------------------

_METHOD = re.compile(
    r"_(?:MTL|NS)_INLINE ([^\n;{}]*?)\s*\b(MTL|NS)::(\w+)::\w+\(([^)]*)\)(?: const)?\s*\{(.*?)\n\}", re.DOTALL
)
_PLAIN = {
    "void": "v",
    "bool": "B",
    "UInteger": "Q",
    "Integer": "q",
    "uint64_t": "Q",
    "StringEncoding": "Q",
    "GPUAddress": "Q",
    "Size": "{?=QQQ}",
}


def _metal_cpp(folder):
    """Returns {(class or protocol, selector): type encodings of the methods that send it, without self and _cmd}."""
    files = [path for part in ("Foundation", "Metal") for path in sorted((folder / part).glob("*.hpp"))]
    text = "".join(path.read_text() for path in files)
    selectors = dict(re.findall(r'_PRIVATE_DEF_SEL\(\s*(\w+),\s*"([^"]+)"\s*\)', text))
    enumerations = {
        name: "Q" if "UInteger" in base else "q"
        for base, name in re.findall(r"_(?:ENUM|OPTIONS)\(\s*([\w:]+),\s*(\w+)\s*\)", text)
    }
    encodings = {}
    for result, prefix, owner, parameters, body in _METHOD.findall(text):
        types = [re.sub(r"\b\w+$", "", parameter.strip()) for parameter in parameters.split(",") if parameter]
        encoding = "".join(_encoding(cpp_type, enumerations) for cpp_type in [result, *types])
        for name in re.findall(r"_PRIVATE_SEL\((\w+)\)", body):
            if name in selectors:
                encodings.setdefault((prefix + owner, selectors[name]), set()).add(encoding)
    return encodings


def _encoding(cpp_type, enumerations):
    """Returns Objective-C's encoding of a C++ type; "?" for a type that our declarations do not use."""
    constant, bare = cpp_type.strip().startswith("const "), re.sub(r"\b(const|class|struct)\b|\s", "", cpp_type)
    base, stars = bare.rstrip("*").split("::")[-1], bare.count("*")
    if base == "char" and stars == 1:
        return "r*" if constant else "*"
    if base in _PLAIN or base in enumerations:
        return ("r" if constant and stars else "") + "^" * stars + _PLAIN.get(base, enumerations.get(base))
    return "^" * (stars - 1) + "@" if stars else "?"
