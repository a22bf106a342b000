"""Checks the extension as macOS's loader would: symbols, libraries, minimum macOS, code signature.

Each import must exist in every release of PyTorch, in macOS 14 (see sdk.py), or in Python's stable ABI 3.10.
"""

import sys

from . import macho
from .report import CheckFailed
from .sdk import MINIMUM

EXPORTS = {"_PyInit__C"}
PYTHON = (3, 10)


def python_symbols(downloads):
    """The symbols of Python's stable ABI up to version 3.10, as Mach-O spells them."""
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
    try:
        image = macho.MachO(path)
    except ValueError as error:
        raise CheckFailed(str(error)) from None
    problems = list(_header_problems(image))
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
        elif symbol not in system.get(library, ()) and not symbol.startswith("_objc_msgSend$"):
            problems.append(f"{symbol} is not known to be in {library} of macOS {MINIMUM[0]}")
    if problems:
        raise CheckFailed(f"{path.name}:\n" + "\n".join(problems))
    return f"{len(imports)} imports, {len(releases)} releases of torch, {path.stat().st_size >> 10} KiB"


def _header_problems(image):
    if image.filetype != macho.BUNDLE:
        yield f"is no bundle (file type {image.filetype}), which is what Python loads"
    if image.platform != macho.PLATFORM_MACOS or image.minimum_macos != MINIMUM:
        yield f"is for platform {image.platform}, version {image.minimum_macos}, and should be for macOS {MINIMUM}"
    for library in image.dylibs:
        if not library.startswith(("/usr/lib/", "/System/Library/Frameworks/", "@rpath/libtorch", "@rpath/libc10")):
            yield f"loads {library}, which is neither macOS's nor PyTorch's"
    for path in image.rpaths:
        yield f"looks for libraries in {path}: PyTorch has loaded them, and a build machine's path is wrong elsewhere"
    for symbol in sorted(image.exports() ^ EXPORTS):
        yield f"exports {symbol}" if symbol not in EXPORTS else f"does not export {symbol}"
    if problem := image.signature_problem():
        yield f"code signature: {problem}"


def _exports(folder):
    """{install name: exported symbols} of a PyTorch's libraries."""
    images = [macho.MachO(path) for path in (folder / "lib").glob("*.dylib")]
    return {image.install_name: image.exports() for image in images}
