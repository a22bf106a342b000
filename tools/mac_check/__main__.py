"""Builds and checks, on Linux, the wheel that Mac users install: `python -m tools.mac_check`, or `make mac-check`.

The tests call it with --quick: it builds the wheel and checks its contents, and needs a tenth of the downloads.
docs/macos.md says what it proves and what only a Mac can prove.
"""

import argparse
import sys
import zipfile

from .. import wheel_check
from ..build.places import MACOS_C_LIBRARY
from . import CheckFailed, binary, build, declarations, faults, pytorch, sdk, seeded_faults, step
from .downloads import Downloads
from .macho import MachO


def quick():
    build.require_tools((build.COMPILER, build.LINKER))
    work = build.WORK / "quick"
    work.mkdir(parents=True, exist_ok=True)
    with step("downloads"):
        downloads = Downloads(quick=True)
    with step("SDK"):
        folder = sdk.assemble(work, downloads)
        torch = sdk.torch_without_libraries(work / "torch")
    # The system's libraries have no symbols here. Behind -O2, which setup.py has, Clang takes no other level from a
    # driver's flags; the binaries do not run, so that time spent on optimizing them would find nothing.
    check_wheel(folder, torch, "-Wl,-undefined,dynamic_lookup", "-Xclang", "-O0")


def check_wheel(folder, torch, *flags):
    with step("wheel built by setup.py") as say:
        wheel = build.build_wheel(folder, torch, *flags)
        say(wheel.name)
    with step("the wheel") as say:
        if wrong := wheel_check.problems(wheel):
            raise CheckFailed(f"{wheel.name}:\n" + "\n".join(wrong))
        say(wheel_check.summary(wheel))
    return wheel


def main():
    build.require_tools()
    build.WORK.mkdir(parents=True, exist_ok=True)
    with step("downloads") as say:
        downloads = Downloads()
        say("torch " + ", ".join(downloads.torch))
    with step("SDK"):
        folder = sdk.assemble(build.WORK, downloads)
        system, python = sdk.system_symbols(downloads), binary.python_symbols(downloads)
    with step("declarations of Foundation and Metal") as say:
        say(declarations.check(folder, downloads, build.WORK))
    wheel = check_wheel(folder, downloads.torch_to_build_with[-1])
    with step("the sources with the oldest torch's headers") as say:
        oldest, built_with = downloads.torch_to_build_with[0], downloads.torch_to_build_with[-1]
        say(build.compile_with_headers(oldest, built_with))
    with step("strict link against each torch") as say:
        for version, torch in downloads.torch.items():
            build.link_strictly(torch, build.WORK / "linked" / f"{version}.so", python_symbols=python)
        say("nothing undefined")
    with step("the extension") as say:
        with zipfile.ZipFile(wheel) as archive:
            extension = build.WORK / "_C.abi3.so"
            extension.write_bytes(archive.read("metalcore/_C.abi3.so"))
        say(binary.check(extension, torch=downloads.torch, system=system, python=python))
    with step("the library for C") as say:
        with zipfile.ZipFile(wheel) as archive:
            library = build.WORK / MACOS_C_LIBRARY
            library.write_bytes(archive.read(f"metalcore/lib/{MACOS_C_LIBRARY}"))
        say(binary.check_c_library(library, system=system))
    with step("PyTorch's streams") as say:
        say(pytorch.check_functions(downloads.torch, MachO(extension).imports()))
    with step("what PyTorch has on a Mac, by release") as say:
        say(pytorch.check_kernels(downloads.torch))
    with step("seeded faults are found") as say:
        say(seeded_faults.check(faults.Subject(folder, downloads, system, python, wheel, extension)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tools.mac_check")
    parser.add_argument("--quick", action="store_true", help="only build the wheel and check its contents")
    try:
        quick() if parser.parse_args().quick else main()
    except CheckFailed as failure:
        sys.exit(f"mac-check: {failure}")
