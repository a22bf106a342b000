"""tools/wheel_check.py passes right wheels, and finds and names each fault of a wheel."""

import base64
import hashlib
import importlib.util
import zipfile
from pathlib import Path

import pytest
from packaging import tags

from tools.build import families as build_families

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("wheel_check", ROOT / "tools" / "wheel_check.py")
wheel_check = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(wheel_check)

TAGS = {
    "Linux": "cp310-abi3-manylinux_2_28_x86_64",
    "Linux on ARM": "cp310-abi3-manylinux_2_28_aarch64",
    "macOS": "cp310-abi3-macosx_14_0_arm64",
}
# Families with another variant for GPUs that flush float16's subnormal numbers.
FLUSHING = {
    family for family, source in build_families.families().items() if build_families.has_flushing_variant(source)
}
SETS = {"Linux": ("x86-64", "x86-64-v3", "x86-64-v4"), "Linux on ARM": ("aarch64",)}
INFO = "metalcore-0.dist-info/"
WHEEL = "Wheel-Version: 1.0\nRoot-Is-Purelib: false\n"


def files_of(platform):
    """A wheel's files. Its binaries are empty except for their first bytes."""
    kernels = ROOT / "kernels"
    families = [path.relative_to(kernels).with_suffix("").as_posix() for path in kernels.rglob("*.metal")]
    sources = [path for path in (ROOT / "metalcore").rglob("*") if path.suffix in (".py", ".h")]
    files = {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in sources}
    files["metalcore_autoload.py"] = (ROOT / "metalcore_autoload.py").read_bytes()
    for path in kernels.rglob("*.*"):
        files[f"metalcore/{path.relative_to(ROOT).as_posix()}"] = path.read_bytes()
    binary = b"\xcf\xfa\xed\xfe" if platform == "macOS" else b"\x7fELF"
    files["metalcore/_C.abi3.so"] = binary
    files[f"metalcore/lib/libmetalcore.{'dylib' if platform == 'macOS' else 'so'}"] = binary
    files["metalcore/lib/pkgconfig/metalcore.pc"] = b""
    files["metalcore/lib/cmake/metalcore/metalcore-config.cmake"] = b""
    if platform in SETS:
        for path in (*(ROOT / "csrc/simulated_device").iterdir(), ROOT / "csrc/backends/simulator/fault.h"):
            files[f"metalcore/simulator/csrc/{path.name}"] = path.read_bytes()
        for family in families:
            suffixes = ("", "-flushing") if family in FLUSHING else ("",)
            for folder in (f"{name}{suffix}" for name in (*SETS[platform], "checking") for suffix in suffixes):
                files[f"metalcore/lib/{folder}/{family}.so"] = binary
            files[f"metalcore/lib/cuda/{family}.cu"] = files[f"metalcore/lib/cuda/{family}.json"] = b""
    else:
        files |= {f"metalcore/lib/metal/{family}.metal": b"" for family in families}
    files["metalcore/lib/index"] = "".join(f"{family} kernel\n" for family in families).encode()
    files[INFO + "WHEEL"] = f"{WHEEL}Tag: {TAGS[platform]}\n".encode()
    files[INFO + "METADATA"] = (
        b"Metadata-Version: 2.1\nName: metalcore\nVersion: 0\nRequires-Python: >=3.10\nRequires-Dist: torch>=2.10\n"
    )
    return files


def wheel_of(files, folder, tag):
    digests = {name: base64.urlsafe_b64encode(hashlib.sha256(content).digest()) for name, content in files.items()}
    record = "".join(f"{name},sha256={digest.rstrip(b'=').decode()},\n" for name, digest in digests.items())
    path = folder / f"metalcore-0-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {**files, INFO + "RECORD": record.encode()}.items():
            archive.writestr(name, content)
    return path


def test_the_families_with_another_variant():
    """The check finds them by itself, since it also runs where the build's modules are not at hand."""
    assert wheel_check._flushing_families() == FLUSHING > {"quant/rows"}


@pytest.mark.parametrize("platform", TAGS)
def test_right_wheels(platform, tmp_path):
    assert wheel_check.problems(wheel_of(files_of(platform), tmp_path, TAGS[platform])) == []


# These faults are of the wheel for Linux. Faults of the wheel for macOS are in tools/mac_check/seeded_faults.py.
FAULTS = {
    "metalcore.libs/libtorch_cpu-1.so": (b"\x7fELF", "is no part of a wheel for Linux"),
    "metalcore/_C.abi3.so": (b"\xcf\xfa\xed\xfe", "is a binary for macOS"),
    "metalcore/lib/index": (b"softmax\n", "has not the families of kernels/, each with its kernels"),
    "metalcore/lib/libmetalcore.so": (None, "is missing"),
    "metalcore/include/metalcore.h": (None, "is missing"),
    "metalcore/lib/cuda/activation/softmax.cu": (None, "is missing"),
    "metalcore/lib/checking/activation/softmax.so": (None, "is missing"),
    "metalcore/lib/x86-64-v3-flushing/quant/rows.so": (None, "is missing"),
    "metalcore/lib/x86-64-v3/activation/softmax.so": (None, "is missing"),
    "metalcore/msl/include/metal/math.h": (None, "is missing"),
    "metalcore/kernels/common/rows.h": (None, "is missing"),
    "metalcore/simulator/csrc/fault.h": (None, "is missing"),
    "metalcore/simulator/csrc/module.cpp": (b"", "is not the checkout's"),
    # This module is for the PyTorch of the build, which is not the one that runs.
    "metalcore/simulator/_device-torch2.13.0-0.so": (b"\x7fELF", "is no part of a wheel for Linux"),
    "metalcore/activation/_softmax.py": (b"", "is not the checkout's"),
    "metalcore/stray.py": (b"", "is not in the checkout"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name, tmp_path):
    content, says = FAULTS[name]
    files = files_of("Linux")
    files.pop(name, None)
    if content is not None:
        files[name] = content
    assert wheel_check.content_problems(wheel_of(files, tmp_path, TAGS["Linux"])) == [f"{name} {says}"]


def test_a_wheel_for_other_instruction_sets(tmp_path):
    """METALCORE_ISA leaves kernels out of a build. The caller tells the check which."""
    files = {name: content for name, content in files_of("Linux").items() if "/lib/x86-64-v" not in name}
    wheel = wheel_of(files, tmp_path, TAGS["Linux"])
    assert wheel_check.content_problems(wheel, "x86-64") == []
    missing = [name for name in files_of("Linux") if "/lib/x86-64-v" in name]
    assert len(wheel_check.content_problems(wheel)) == len(missing)


def test_a_tag_that_pip_does_not_know(tmp_path):
    found = wheel_check.problems(wheel_of(files_of("Linux"), tmp_path, "cp313-cp313-manylinux_2_28_x86_64"))
    assert [text for text in found if "Python 3.13" in text] == []
    assert {
        f"pip does not take it on manylinux_2_28_x86_64 with Python {python}"
        for python in wheel_check.PYTHONS
        if python != "3.13"
    } == set(found)


@pytest.mark.parametrize("name", TAGS)
def test_free_threaded_pythons_take_no_wheel(name):
    tag, machine = TAGS[name], TAGS[name].split("-")[-1]
    assert tag in map(str, tags.cpython_tags((3, 14), ["cp314"], [machine]))
    assert tag not in map(str, tags.cpython_tags((3, 14), ["cp314t"], [machine]))


def test_a_wheel_that_is_not_repaired(tmp_path):
    files = files_of("Linux")
    files[INFO + "WHEEL"] = f"{WHEEL}Tag: cp310-abi3-linux_x86_64\n".encode()
    (found,) = wheel_check.problems(wheel_of(files, tmp_path, "cp310-abi3-linux_x86_64"))
    assert found.startswith("WHEEL has the tags ['cp310-abi3-linux_x86_64']")
