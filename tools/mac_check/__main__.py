"""Builds and checks, on Linux, the wheel that Mac users install: `python -m tools.mac_check`, or `make mac-check`.

What it proves and what only a Mac can: docs/macos.md.
"""

import sys
import zipfile

from . import binary, build, declarations, faults, pytorch, sdk, wheel
from .downloads import Downloads
from .macho import MachO
from .report import CheckFailed, step


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
    with step("wheel built by setup.py") as say:
        made = build.build_wheel(folder, downloads.newest_torch)
        say(made.name)
    with step("strict link against each torch") as say:
        for version, torch in downloads.torch.items():
            build.link_strictly(torch, build.WORK / "linked" / f"{version}.so", python_symbols=python)
        say("nothing undefined")
    with step("the extension") as say:
        with zipfile.ZipFile(made) as archive:
            extension = build.WORK / "_C.abi3.so"
            extension.write_bytes(archive.read("metalcore/_C.abi3.so"))
        say(binary.check(extension, torch=downloads.torch, system=system, python=python))
    with step("PyTorch's streams") as say:
        say(pytorch.check(downloads.torch, MachO(extension).imports()))
    with step("the wheel") as say:
        say(wheel.check(made))
    with step("seeded faults are found") as say:
        say(faults.check(faults.Subject(folder, downloads, system, python, made, extension)))


if __name__ == "__main__":
    try:
        main()
    except CheckFailed as failure:
        sys.exit(f"mac-check: {failure}")
