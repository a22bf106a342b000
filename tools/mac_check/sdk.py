"""Assembles a stand-in for a Mac's SDK: Darwin's and libc++'s headers, our declarations of Foundation and Metal, and
text stubs of the system's libraries.

A symbol enters a stub only if a library that was built on a Mac for macOS 14 or older binds it to that system library.
"""

import hashlib
import importlib.util
import re
import shutil
import sysconfig
from pathlib import Path

from .macho import MachO

HERE = Path(__file__).parent
MINIMUM = (14, 0)
_FRAMEWORKS = "/System/Library/Frameworks"
_CORE_FOUNDATION = f"{_FRAMEWORKS}/CoreFoundation.framework/Versions/A/CoreFoundation"
_OBJC = "/usr/lib/libobjc.A.dylib"
# The extension may link against these, by the linker's name, with what each re-exports. (libSystem's stub is Zig's.)
_LIBRARIES = {
    "usr/lib/libc++": ("/usr/lib/libc++.1.dylib", []),
    "usr/lib/libobjc": (_OBJC, []),
    f"{_FRAMEWORKS[1:]}/Metal.framework/Metal": (f"{_FRAMEWORKS}/Metal.framework/Versions/A/Metal", []),
    f"{_FRAMEWORKS[1:]}/CoreFoundation.framework/CoreFoundation": (_CORE_FOUNDATION, []),
    f"{_FRAMEWORKS[1:]}/IOKit.framework/IOKit": (f"{_FRAMEWORKS}/IOKit.framework/Versions/A/IOKit", []),
    f"{_FRAMEWORKS[1:]}/Foundation.framework/Foundation": (
        f"{_FRAMEWORKS}/Foundation.framework/Versions/C/Foundation",
        [_CORE_FOUNDATION, _OBJC],
    ),
}
# libc++ has it for certain, though none of those libraries happens to use it: version 1 of libc++'s ABI instantiates it
# in the library (_LIBCPP_STRING_V1_EXTERN_TEMPLATE_LIST in <__string/extern_template_lists.h>).
_INSTANTIATED = {"__ZNSt3__112basic_stringIcNS_11char_traitsIcEENS_9allocatorIcEEE21__grow_by_and_replaceEmmmmmmPKc"}
_CLASS = "_OBJC_CLASS_$_"
# The pyconfig.h of the Python that runs this defines them, since it is Linux's.
_NOT_ON_MACOS = ("HAVE_CRYPT_H", "HAVE_CRYPT_R", "HAVE_LINUX_RANDOM_H")


def assemble(parent, downloads):
    """Returns the folder of the SDK below `parent`. Its name says what it was made from, and a change makes it anew."""
    made_from = hashlib.sha256(" ".join(map(str, downloads.folders)).encode())
    for path in [Path(__file__), *sorted((HERE / "sdk").iterdir())]:
        made_from.update(path.read_bytes())
    folder = parent / f"sdk-{made_from.hexdigest()[:12]}"
    if not folder.exists():
        for old in parent.glob("sdk-*"):
            shutil.rmtree(old)
        partial = parent / "sdk-partial"
        _fill(partial, downloads)
        partial.rename(folder)
    return folder


def torch_without_libraries(folder):
    """Returns the installed PyTorch as a Mac would have it, with empty libraries under their names."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "lib").mkdir(parents=True)
    torch = Path(importlib.util.find_spec("torch").submodule_search_locations[0])
    (folder / "include").symlink_to(torch / "include")
    shutil.copy2(torch / "version.py", folder)
    for name in ("libtorch", "libtorch_cpu", "libc10"):
        (folder / "lib" / f"{name}.tbd").write_text(_stub(f"@rpath/{name}.dylib", [], []))
    return folder


def _fill(folder, downloads):
    zig = downloads.pinned["ziglang"] / "ziglang" / "lib"
    include = folder / "usr" / "include"
    shutil.copytree(zig / "libc" / "include" / "any-macos-any", include)
    shutil.copytree(zig / "libcxx" / "include", include / "c++" / "v1")
    for header in (zig / "libcxxabi" / "include").glob("*.h"):
        shutil.copy(header, include / "c++" / "v1")
    shutil.copy(HERE / "sdk" / "__config_site", include / "c++" / "v1")
    config = include / "c++" / "v1" / "__config"  # Zig passes the site's configuration on its command line instead
    config.write_text(re.sub(r"/\* zig patch:.*?\*/", "#include <__config_site>", config.read_text(), count=1))
    (folder / "usr" / "lib").mkdir()
    shutil.copy(zig / "libc" / "darwin" / "libSystem.tbd", folder / "usr" / "lib")
    for name in ("Foundation", "Metal"):
        headers = folder / "System/Library/Frameworks" / f"{name}.framework" / "Headers"
        headers.mkdir(parents=True)
        shutil.copy(HERE / "sdk" / f"{name}.h", headers)
    known = system_symbols(downloads)
    for name, (install_name, reexported) in _LIBRARIES.items():
        stub = _stub(install_name, reexported, known[install_name])
        for path in (folder / f"{name}.tbd", folder / (install_name[1:].removesuffix(".dylib") + ".tbd")):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(stub)
    _python_headers(folder / "python")


def system_symbols(downloads):
    """Returns {install name: symbols that libraries built on a Mac take from it}, with libSystem's own list."""
    known = {install_name: set() for install_name, _ in _LIBRARIES.values()}
    for path in downloads.evidence():
        image = MachO(path)
        if image.minimum_macos and image.minimum_macos <= MINIMUM:
            for symbol, library in image.imports().items():
                if library and library.startswith("/"):
                    known.setdefault(library, set()).add(symbol)
    known["/usr/lib/libc++.1.dylib"] |= _INSTANTIATED
    stub = downloads.pinned["ziglang"] / "ziglang/lib/libc/darwin/libSystem.tbd"
    known["/usr/lib/libSystem.B.dylib"] = set(re.findall(r"[\s\[,'](_[\w$.]+|dyld_\w+)", stub.read_text()))
    return known


def _stub(install_name, reexported, symbols):
    classes = sorted(symbol.removeprefix(_CLASS) for symbol in symbols if symbol.startswith(_CLASS))
    plain = sorted(symbol for symbol in symbols if not symbol.startswith("_OBJC_"))
    lines = ["--- !tapi-tbd", "tbd-version: 4", "targets: [ arm64-macos ]", f"install-name: '{install_name}'"]
    if reexported:
        lines += ["reexported-libraries:", "  - targets: [ arm64-macos ]", f"    libraries: {_list(reexported)}"]
    lines += ["exports:", "  - targets: [ arm64-macos ]", f"    symbols: {_list(plain)}"]
    if classes:
        lines.append(f"    objc-classes: {_list(classes)}")
    return "\n".join([*lines, "...", ""])


def _list(items):
    return "[ " + ", ".join(f"'{item}'" for item in items) + " ]"


def _python_headers(folder):
    """Copies Python's headers. Our code uses their limited API, and only pyconfig.h knows the platform."""
    include = Path(sysconfig.get_path("include"))
    shutil.copytree(include, folder)
    config = folder / "pyconfig.h"
    # Debian's own only chooses among those of the architectures.
    chosen = include.parent / (sysconfig.get_config_var("MULTIARCH") or "") / include.name / config.name
    text = (chosen if chosen.is_file() else config).read_text()
    for name in _NOT_ON_MACOS:
        text = re.sub(rf"#\s*define {name} .*", "", text)
    config.write_text(text)
