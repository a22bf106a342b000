"""Negative controls: each fault is put into a copy of what the check looks at, and the check must find and name it.

A check without findings proves something only if it can find faults.
"""

import re
import shutil
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .. import wheel_check
from . import binary, build, declarations, pytorch
from .macho import MachO
from .report import CheckFailed
from .sdk import HERE


@dataclass
class Subject:
    """The files that have been built and have passed the check."""

    sdk: Path
    downloads: object
    system: dict
    python: list
    wheel: Path
    extension: Path


def check(subject):
    """Raises CheckFailed, which names the faults that were not found or were worded otherwise."""
    folder = build.WORK / "faults"
    shutil.rmtree(folder, ignore_errors=True)

    def missed(fault):
        work = folder / re.sub(r"\W+", "-", fault.name)
        work.mkdir(parents=True)
        try:
            fault.run(subject, work)
        except CheckFailed as failure:
            return "" if re.search(fault.says, str(failure)) else f"{fault.name}: found, but its message is\n{failure}"
        return f"{fault.name}: not found"

    with ThreadPoolExecutor(build.JOBS) as pool:
        problems = [text for text in pool.map(missed, FAULTS) if text]
    if problems:
        raise CheckFailed("faults that were seeded and missed:\n" + "\n".join(problems))
    return f"{len(FAULTS)} faults"


@dataclass
class SourceFault:
    """A change of csrc/backends/mps. The result is compiled and linked with the rest against the oldest torch."""

    name: str
    file: str
    old: str
    new: str
    says: str
    torch: int = 0

    def run(self, subject, work):
        for part in ("backends/mps", "gpu"):
            shutil.copytree(build.ROOT / "csrc" / part, work / part)
        _replace(work / "backends" / "mps" / self.file, self.old, self.new)
        source, target = work / "backends/mps/backend.mm", work / "backend.o"
        link = [str(target) if part.endswith("mps/backend.o") else part for part in build.link_command()]
        _, flags = build.compile_command("backends/mps/backend")
        build.run([*flags, "-c", str(source), "-o", str(target)], "backend.mm does not compile")
        version, torch = list(subject.downloads.torch.items())[self.torch]
        built = build.link_strictly(torch, work / "_C.so", python_symbols=subject.python, command=link)
        binary.check(built, torch={version: torch}, system=subject.system, python=subject.python)
        pytorch.check({version: torch}, MachO(built).imports())


@dataclass
class HeaderFault:
    """A change of one of csrc's sources. The result is compiled with the oldest torch's headers."""

    name: str
    file: str
    old: str
    new: str
    says: str

    def run(self, subject, work):
        source = work / Path(self.file).name
        shutil.copy(build.ROOT / "csrc" / self.file, source)
        _replace(source, self.old, self.new)
        oldest, built_with = subject.downloads.torch_to_build_with[0], subject.downloads.torch_to_build_with[-1]
        build.compile_source(self.file.removesuffix(".cpp"), oldest, built_with, source)


@dataclass
class DeclarationFault:
    """A change of our declarations of Foundation and Metal."""

    name: str
    file: str
    old: str
    new: str
    says: str

    def run(self, subject, work):
        headers, sdk = work / "headers", work / "sdk"
        shutil.copytree(HERE / "sdk", headers)
        _replace(headers / self.file, self.old, self.new)
        shutil.copytree(subject.sdk, sdk, symlinks=True)
        for name in ("Foundation", "Metal"):
            shutil.copy(headers / f"{name}.h", sdk / f"System/Library/Frameworks/{name}.framework/Headers")
        declarations.check(sdk, subject.downloads, work, headers)


@dataclass
class LinkFault:
    """Another way of linking the extension. The check must see it in the result."""

    name: str
    change: object  # a function that changes the list of the command's parts
    says: str

    def run(self, subject, work):
        command = build.link_command()
        self.change(command, work)
        command[command.index("-o") + 1] = str(work / "_C.abi3.so")
        build.run(command, "does not link")
        binary.check(work / "_C.abi3.so", torch=subject.downloads.torch, system=subject.system, python=subject.python)


@dataclass
class FileFault:
    """A change of the built extension's bytes."""

    name: str
    change: object  # of the bytes, in a bytearray
    says: str

    def run(self, subject, work):
        content = bytearray(subject.extension.read_bytes())
        self.change(content)
        (work / "_C.abi3.so").write_bytes(content)
        binary.check(work / "_C.abi3.so", torch=subject.downloads.torch, system=subject.system, python=subject.python)


@dataclass
class WheelFault:
    """A change of the wheel: of its name, or of its files by name."""

    name: str
    change: object  # (name, {file: content}) -> name
    says: str

    def run(self, subject, work):
        with zipfile.ZipFile(subject.wheel) as archive:
            files = {name: archive.read(name) for name in archive.namelist()}
        path = work / (self.change(subject.wheel.name, files) or subject.wheel.name)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        if wrong := wheel_check.problems(path):
            raise CheckFailed("\n".join(wrong))


def _replace(path, old, new):
    text = path.read_text()
    if text.count(old) != 1:
        raise RuntimeError(f"this fault cannot be seeded: {path.name} has {old!r} {text.count(old)} times")
    path.write_text(text.replace(old, new))


def _add_library(command, work):
    source, library = work / "extra.c", work / "libextra.dylib"
    source.write_text("void extra(void) {}\n")
    start = command[: command.index("-bundle")]
    build.run(
        [
            *start,
            "-dynamiclib",
            "-x",
            "c",
            str(source),
            "-x",
            "none",
            "-o",
            str(library),
            "-install_name",
            "/opt/homebrew/lib/libextra.dylib",
        ],
        "the library for a fault does not link",
    )
    command += [str(library), "-Wl,-needed_library," + str(library)]


def _set(command, old, new):
    for i, part in enumerate(command):
        command[i] = part.replace(old, new)


def _unsign(content):
    """Makes the load command of the code signature an unknown one."""
    at = content.index(b"\x1d\0\0\0\x10\0\0\0")
    content[at] = 0x7E


def _flip(content):
    content[len(content) // 3] ^= 1


def _rename(old, new):
    def change(name, files):
        wheel_file = next(file for file in files if file.endswith(".dist-info/WHEEL"))
        files[wheel_file] = files[wheel_file].replace(old.encode(), new.encode())
        return name.replace(old, new)

    return change


def _require_python(versions):
    def change(name, files):
        metadata = next(file for file in files if file.endswith(".dist-info/METADATA"))
        files[metadata] = re.sub(rb"(?m)^Requires-Python: .*", f"Requires-Python: {versions}".encode(), files[metadata])

    return change


def _without(file):
    def change(name, files):
        del files[file]

    return change


def _with(file, content):
    def change(name, files):
        files[file] = content

    return change


FAULTS = [
    SourceFault(
        "a misspelled selector",
        "backend.mm",
        "[encoder_ dispatchThreads:",
        "[encoder_ dispatchThreadz:",
        r"dispatchThreadz:threadsPerThreadgroup:' not found",
    ),
    SourceFault(
        "a method that Metal has no declaration of",
        "backend.mm",
        "device.maxThreadgroupMemoryLength",
        "device.maxThreadgroupMemory",
        r"property 'maxThreadgroupMemory' not found",
    ),
    SourceFault(
        "PyTorch's headers beside Metal's",
        "stream.h",
        "#import <Metal/Metal.h>",
        "#import <Metal/Metal.h>\n#include <torch/csrc/stable/library.h>",
        r"StringHandle",
    ),
    SourceFault(
        "a function of PyTorch's that does not exist",
        "backend.mm",
        "at::mps::getCurrentMPSStream()",
        "at::mps::getTurboMPSStream()",
        r"getTurboMPSStream",
    ),
    SourceFault(
        "a function declared and not exported",
        "stream.h",
        "dispatch_queue_t get_dispatch_queue();",
        "dispatch_queue_t get_dispatch_queue(int = 0);",
        r"undefined symbol: torch::mps::get_dispatch_queue\(int\)",
    ),
    SourceFault(
        "a function of newer releases only",
        "backend.mm",
        "  if (work.error) ",
        "  extern void from_2_14(at::mps::MPSStream*) "
        'asm("__ZN2at3mps19setCurrentMPSStreamEPNS0_9MPSStreamE");\n  from_2_14(nullptr);\n  if (work.error) ',
        r"does not link against torch-2-10.*(?s:.*)setCurrentMPSStream",
    ),
    SourceFault(
        "a class that Metal has not",
        "backend.mm",
        "namespace metalcore::mps {\nnamespace {\n",
        "@interface MTLBogus : NSObject\n@end\nid bogus() { return [MTLBogus new]; }\n"
        "namespace metalcore::mps {\nnamespace {\n",
        r"OBJC_CLASS_\$_MTLBogus",
    ),
    SourceFault(
        "a function outside Python's limited API",
        "backend.mm",
        "  if (work.error) ",
        '  extern void outside() asm("_PyUnicode_AsUTF8");\n  outside();\n  if (work.error) ',
        r"undefined symbol: _?PyUnicode_AsUTF8",
    ),
    SourceFault(
        "a function of macOS that is newer than 14",
        "backend.mm",
        "  if (work.error) ",
        '  extern void newer() asm("_os_sync_wait_on_address_of_macos_15");\n  newer();\n  if (work.error) ',
        r"undefined symbol: _?os_sync_wait_on_address_of_macos_15",
    ),
    HeaderFault(
        "a macro of newer releases only",
        "ops/tensor_list.cpp",
        "  TORCH_ERROR_CODE_CHECK(torch_list_size",
        "  STABLE_TORCH_ERROR_CODE_CHECK(torch_list_size",
        r"tensor_list\.cpp does not compile with torch-2-10.*(?s:.*)STABLE_TORCH_ERROR_CODE_CHECK",
    ),
    DeclarationFault(
        "a declared type that differs from Apple's metadata",
        "Metal.h",
        "atIndex:(NSUInteger)index;\n- (void)setBuffer:",
        "atIndex:(int)index;\n- (void)setBuffer:",
        r"\[MTLComputeCommandEncoder setBytes:length:atIndex:\] has the types v\d+@0:8r\^v16Q24i32",
    ),
    DeclarationFault(
        "a declared type that differs from metal-cpp",
        "Metal.h",
        "uint64_t gpuAddress",
        "uint32_t gpuAddress",
        r"\[MTLBuffer gpuAddress\] has the types I, Apple's Q",
    ),
    DeclarationFault(
        "a selector that Apple has not",
        "Foundation.h",
        "+ (NSURL*)fileURLWithPath:",
        "+ (NSURL*)URLWithFilePath:",
        r"\+\[NSURL URLWithFilePath:\] is not in Apple's headers",
    ),
    DeclarationFault(
        "an enumerator with another value",
        "Metal.h",
        "(3 << 16) + 1",
        "(3 << 16) + 2",
        r"MTLLanguageVersion3_1 is 196609 in Apple's headers",
    ),
    DeclarationFault(
        "an enumerator that Apple has not",
        "Metal.h",
        "MTLGPUFamilyApple1 = 1001",
        "MTLGPUFamilyPear1 = 1001",
        r"MTLGPUFamilyPear1: Apple's headers have no such enumerator",
    ),
    LinkFault(
        "a newer minimum of macOS",
        lambda command, work: _set(command, "14.0", "15.0"),
        r"version \(15, 0\), and should be for macOS \(14, 0\)",
    ),
    LinkFault("a library of the build machine's", _add_library, r"loads /opt/homebrew/lib/libextra\.dylib"),
    LinkFault(
        "a path of the build machine's",
        lambda command, work: command.append("-Wl,-rpath,/Users/ci/torch/lib"),
        r"looks for libraries in /Users/ci/torch/lib",
    ),
    LinkFault(
        "an entry point that is not there",
        lambda command, work: command.append("-Wl,-unexported_symbol,_PyInit__C"),
        r"does not export _PyInit__C",
    ),
    LinkFault(
        "a dynamic library in place of a bundle",
        lambda command, work: _set(command, "-bundle", "-dynamiclib"),
        r"is no bundle \(file type 6\)",
    ),
    FileFault("a byte changed after signing", _flip, r"code signature: page \d+ is not what was signed"),
    FileFault("no code signature", _unsign, r"code signature: there is none"),
    WheelFault(
        "a tag that older Macs take",
        _rename("macosx_14_0", "macosx_13_0"),
        r"pip takes it on macosx_13_0_arm64 with Python 3\.10",
    ),
    WheelFault(
        "a tag for one Python",
        _rename("cp310-abi3", "cp311-cp311"),
        r"pip does not take it on macosx_14_0_arm64 with Python 3\.12",
    ),
    WheelFault(
        "metadata for newer Pythons only",
        _require_python(">=3.12"),
        r"pip does not take it on macosx_26_0_arm64 with Python 3\.11",
    ),
    WheelFault(
        "a kernel left out",
        _without("metalcore/lib/metal/softmax.metal"),
        r"metalcore/lib/metal/softmax\.metal is missing",
    ),
    WheelFault(
        "a kernel with an include",
        _with("metalcore/lib/metal/softmax.metal", b'#include "softmax.h"\n'),
        r"softmax\.metal includes a file",
    ),
    WheelFault(
        "a Linux binary",
        _with("metalcore/lib/x86-64/softmax.so", b"\x7fELF"),
        r"metalcore/lib/x86-64/softmax\.so is a binary for Linux",
    ),
    WheelFault(
        "a file that RECORD does not know",
        _with("metalcore/stray.py", b""),
        r"RECORD does not match metalcore/stray\.py",
    ),
    WheelFault(
        "a module of an earlier build", _with("metalcore/stray.py", b""), r"metalcore/stray\.py is not in the checkout"
    ),
    WheelFault(
        "a module that is not the checkout's",
        _with("metalcore/activation/_softmax.py", b""),
        r"metalcore/softmax\.py is not the checkout's",
    ),
]
