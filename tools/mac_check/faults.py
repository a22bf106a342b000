"""Kinds of faults that are put into copies of what the check looks at, and the changes that they make there."""

import re
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path

from .. import wheel_check
from ..build.places import MACOS_C_LIBRARY
from . import CheckFailed, binary, build, declarations, pytorch
from .macho import MachO
from .sdk import HERE

AT_THE_END = ""  # in place of text that a fault replaces


@dataclass
class Subject:
    """The files that have been built and have passed the check."""

    sdk: Path
    downloads: object
    system: dict
    python: list
    wheel: Path
    extension: Path


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
        name = Path(self.file).stem if self.file.endswith(".mm") else "backend"
        source, target = work / f"backends/mps/{name}.mm", work / f"{name}.o"
        link = [str(target) if part.endswith(f"mps/{name}.o") else part for part in build.link_command()]
        _, flags = build.compile_command(f"backends/mps/{name}")
        build.run([*flags, "-c", str(source), "-o", str(target)], f"{name}.mm does not compile")
        version, torch = list(subject.downloads.torch.items())[self.torch]
        built = build.link_strictly(torch, work / "_C.so", python_symbols=subject.python, command=link)
        binary.check(built, torch={version: torch}, system=subject.system, python=subject.python)
        pytorch.check_functions({version: torch}, MachO(built).imports())


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
    """A change of our declarations of Foundation and Metal, or of the backend's own ones."""

    name: str
    file: str
    old: str
    new: str
    says: str

    def run(self, subject, work):
        headers, sdk = work / "headers", work / "sdk"
        shutil.copytree(HERE / "sdk", headers)
        shutil.copy(build.ROOT / "csrc/backends/mps/compile_options.mm", headers)
        _replace(headers / self.file, self.old, self.new)
        shutil.copytree(subject.sdk, sdk, symlinks=True)
        for name in ("Foundation", "Metal"):
            shutil.copy(headers / f"{name}.h", sdk / f"System/Library/Frameworks/{name}.framework/Headers")
        declarations.check(sdk, subject.downloads, work, headers)


@dataclass
class EncoderFault:
    """A library in PyTorch's place that opens encoders, and has this function too."""

    name: str
    function: str
    says: str

    def run(self, subject, work):
        source, library = work / "stream.mm", work / "libtorch_cpu.dylib"
        source.write_text(
            "#import <Foundation/Foundation.h>\n@interface Buffer : NSObject\n- (id)computeCommandEncoder;\n"
            "- (id)computeCommandEncoderWithDispatchType:(NSUInteger)type;\n@end\n"
            "id serial(Buffer* buffer) { return [buffer computeCommandEncoder]; }\n" + self.function
        )
        command = [*build.compiler(subject.sdk), "-dynamiclib", str(source), "-o", str(library)]
        build.run([*command, "-lobjc", "-Wl,-undefined,dynamic_lookup"], "the library for a fault does not link")
        pytorch.check_encoders("0", library)


@dataclass
class LinkFault:
    """Another way of linking the extension. The check must see it in the result."""

    name: str
    change: object  # a function that changes the list of the command's parts
    says: str

    OUTPUT = "_C.abi3.so"

    def run(self, subject, work):
        command, library = build.link_command(self.OUTPUT), work / Path(self.OUTPUT).name
        self.change(command, work)
        command[command.index("-o") + 1] = str(library)
        build.run(command, "does not link")
        self.check(library, subject)

    def check(self, library, subject):
        binary.check(library, torch=subject.downloads.torch, system=subject.system, python=subject.python)


class CLinkFault(LinkFault):
    """Another way of linking the library for C."""

    OUTPUT = f"lib/{MACOS_C_LIBRARY}"

    def check(self, library, subject):
        binary.check_c_library(library, system=subject.system)


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
    if old == AT_THE_END:
        path.write_text(text + new)
        return
    if text.count(old) != 1:
        raise RuntimeError(f"this fault cannot be seeded: {path.name} has {old!r} {text.count(old)} times")
    path.write_text(text.replace(old, new))


def uses(symbol):
    """Returns C++ that needs a symbol of another library."""
    return f'extern void of_another_library() asm("{symbol}");\nvoid (*metalcore_used)() = of_another_library;\n'


def add_library(command, work):
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


def with_part(text, *flags):
    """Adds C++ to the library for C."""

    def change(command, work):
        source, target = work / "part.cpp", work / "part.o"
        source.write_text(text)
        build.run([*command[: command.index("-dynamiclib")], "-c", str(source), "-o", str(target)], "does not compile")
        command += [str(target), *flags]

    return change


def set_in(command, old, new):
    for i, part in enumerate(command):
        command[i] = part.replace(old, new)


def unsign(content):
    """Makes the load command of the code signature an unknown one."""
    at = content.index(b"\x1d\0\0\0\x10\0\0\0")
    content[at] = 0x7E


def flip(content):
    content[len(content) // 3] ^= 1


def rename(old, new):
    def change(name, files):
        wheel_file = next(file for file in files if file.endswith(".dist-info/WHEEL"))
        files[wheel_file] = files[wheel_file].replace(old.encode(), new.encode())
        return name.replace(old, new)

    return change


def require_python(versions):
    def change(name, files):
        metadata = next(file for file in files if file.endswith(".dist-info/METADATA"))
        files[metadata] = re.sub(rb"(?m)^Requires-Python: .*", f"Requires-Python: {versions}".encode(), files[metadata])

    return change


def without(file):
    def change(name, files):
        del files[file]

    return change


def with_file(file, content):
    def change(name, files):
        files[file] = content

    return change
