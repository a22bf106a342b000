"""Checks the extension and the library for C as macOS's loader would: symbols, libraries, minimum macOS, signature.

Each import of the extension must exist in every release of PyTorch, in macOS 14 (see sdk.py), or in Python's stable ABI
3.10. The library for C has macOS alone.
"""

import re
import sys
from dataclasses import dataclass

from ..build.places import MACOS_C_LIBRARY, PACKAGE
from . import CheckFailed, macho
from .sdk import MINIMUM

PYTHON = (3, 10)


@dataclass
class Kind:
    """What a binary must be.

    Attributes:
        install_name: None for a bundle.
        libraries: the beginnings of the libraries that it may load.
    """

    filetype: int
    described: str
    install_name: str | None
    exports: set
    libraries: tuple


_SYSTEM = ("/usr/lib/", "/System/Library/Frameworks/")
_EXTENSION = Kind(
    macho.BUNDLE,
    "no bundle, which is what Python loads",
    None,
    {"_PyInit__C"},
    (*_SYSTEM, "@rpath/libtorch", "@rpath/libc10"),
)
_FUNCTION = re.compile(r"^METALCORE_API [\w ]+?\**\s*(metalcore_\w+)\(", re.MULTILINE)


def c_functions():
    """Returns the functions that metalcore.h declares."""
    return _FUNCTION.findall((PACKAGE / "include" / "metalcore.h").read_text())


def python_symbols(downloads):
    """Returns the symbols of Python's stable ABI up to version 3.10, as Mach-O spells them."""
    sys.path.insert(0, str(downloads.pinned["abi3info"]))
    try:
        import abi3info
    finally:
        sys.path.pop(0)
    items = [*abi3info.FUNCTIONS.values(), *abi3info.DATAS.values()]
    return sorted(f"_{item.symbol.name}" for item in items if (item.added.major, item.added.minor) <= PYTHON)


def check(path, *, torch, system, python):
    """Raises CheckFailed, which names everything that is wrong with the extension; returns a summary of the check.

    Args:
        torch: {version: folder of the package}.
        system: {install name: symbols} of macOS.
        python: symbols that Python provides.
    """
    image = _image(path)
    problems = list(_header_problems(image, _EXTENSION))
    imports = image.imports()
    releases = {version: _exports(folder) for version, folder in torch.items()}
    for symbol, library in sorted(imports.items()):
        if library is None:
            if symbol not in python:
                problems.append(f"{symbol} is in no library that is linked, nor in Python's stable ABI 3.{PYTHON[1]}")
        elif library.startswith("@rpath/"):
            missing = [version for version, exports in releases.items() if symbol not in exports.get(library, ())]
            if missing:
                problems.append(f"{symbol} is not in {library} of torch {', '.join(missing)}")
        else:
            problems += _system_problems(symbol, library, system)
    _refuse(path, problems)
    return f"{len(imports)} imports, {len(releases)} releases of torch, {path.stat().st_size >> 10} KiB"


def check_c_library(path, *, system):
    """The same for the library for C."""
    image = _image(path)
    functions = {f"_{name}" for name in c_functions()}
    kind = Kind(macho.DYLIB, "no dynamic library", f"@rpath/{MACOS_C_LIBRARY}", functions, _SYSTEM)
    problems = list(_header_problems(image, kind))
    imports = image.imports()
    for symbol, library in sorted(imports.items()):
        if library is None:
            problems.append(f"{symbol} is in no library that is linked")
        else:
            problems += _system_problems(symbol, library, system)
    _refuse(path, problems)
    return f"{len(functions)} functions, {len(imports)} imports, {path.stat().st_size >> 10} KiB"


def _image(path):
    try:
        return macho.MachO(path)
    except ValueError as error:
        raise CheckFailed(str(error)) from None


def _refuse(path, problems):
    if problems:
        raise CheckFailed(f"{path.name}:\n" + "\n".join(problems))


def _system_problems(symbol, library, system):
    if symbol not in system.get(library, ()) and not symbol.startswith("_objc_msgSend$"):
        yield f"{symbol} is not known to be in {library} of macOS {MINIMUM[0]}"


def _header_problems(image, kind):
    if image.filetype != kind.filetype:
        yield f"is {kind.described} (file type {image.filetype})"
    if image.install_name != kind.install_name:
        yield f"has the install name {image.install_name}, not {kind.install_name}"
    if image.platform != macho.PLATFORM_MACOS or image.minimum_macos != MINIMUM:
        yield f"is for platform {image.platform}, version {image.minimum_macos}, and should be for macOS {MINIMUM}"
    for library in image.dylibs:
        if not library.startswith(kind.libraries):
            yield f"loads {library}, which is not among {', '.join(kind.libraries)}"
    for path in image.rpaths:
        yield f"looks for libraries in {path}: a build machine's path is wrong elsewhere"
    for symbol in sorted(image.exports() ^ kind.exports):
        yield f"exports {symbol}" if symbol not in kind.exports else f"does not export {symbol}"
    if problem := image.signature_problem():
        yield f"code signature: {problem}"


def _exports(folder):
    """Returns {install name: exported symbols} of a PyTorch's libraries."""
    images = [macho.MachO(path) for path in (folder / "lib").glob("*.dylib")]
    return {image.install_name: image.exports() for image in images}
