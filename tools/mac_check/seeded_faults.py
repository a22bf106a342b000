"""Negative controls: each fault is put into a copy of what the check looks at, and the check must find and name it.

A check without findings proves something only if it can find faults.
"""

import re
import shutil
from concurrent.futures import ThreadPoolExecutor

from . import CheckFailed, build
from .faults import (
    AT_THE_END,
    CLinkFault,
    DeclarationFault,
    EncoderFault,
    FileFault,
    HeaderFault,
    LinkFault,
    SourceFault,
    WheelFault,
    add_library,
    flip,
    rename,
    require_python,
    set_in,
    unsign,
    uses,
    with_file,
    with_part,
    without,
)


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


FAULTS = [
    SourceFault(
        "a misspelled selector",
        "encoder.mm",
        "[encoder_ dispatchThreads:",
        "[encoder_ dispatchThreadz:",
        r"dispatchThreadz:threadsPerThreadgroup:' not found",
    ),
    SourceFault(
        "a method that Metal has no declaration of",
        "encoder.mm",
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
        "a commit that is declared otherwise",
        "stream.h",
        "void synchronize(SyncType type);",
        "void synchronize(SyncType type, bool wait = false);",
        r"undefined symbol: at::mps::MPSStream::synchronize\(at::mps::SyncType, bool\)",
    ),
    SourceFault(
        "a function of newer releases only",
        "backend.mm",
        AT_THE_END,
        uses("__ZN2at3mps19setCurrentMPSStreamEPNS0_9MPSStreamE"),
        r"does not link against torch-2-10.*(?s:.*)setCurrentMPSStream",
    ),
    SourceFault(
        "a class that Metal has not",
        "backend.mm",
        AT_THE_END,
        "@interface MTLBogus : NSObject\n@end\nid bogus() { return [MTLBogus new]; }\n",
        r"OBJC_CLASS_\$_MTLBogus",
    ),
    SourceFault(
        "a function outside Python's limited API",
        "backend.mm",
        AT_THE_END,
        uses("_PyUnicode_AsUTF8"),
        r"undefined symbol: _?PyUnicode_AsUTF8",
    ),
    SourceFault(
        "a function of macOS that is newer than 14",
        "backend.mm",
        AT_THE_END,
        uses("_os_sync_wait_on_address_of_macos_15"),
        r"undefined symbol: _?os_sync_wait_on_address_of_macos_15",
    ),
    HeaderFault(
        "a macro of newer releases only",
        "ops/optim/multi_tensor.cpp",
        "  TORCH_ERROR_CODE_CHECK(torch_list_size",
        "  STABLE_TORCH_ERROR_CODE_CHECK(torch_list_size",
        r"multi_tensor\.cpp does not compile with torch-2-10.*(?s:.*)STABLE_TORCH_ERROR_CODE_CHECK",
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
    DeclarationFault(
        "a newer selector that Apple has not",
        "compile_options.mm",
        "- (void)setMathMode:(NSInteger)mode;",
        "- (void)setMathModes:(NSInteger)mode;",
        r"-\[MTLCompileOptions setMathModes:\] is not in Apple's headers",
    ),
    DeclarationFault(
        "a newer enumerator with another value",
        "compile_options.mm",
        "kMTLMathModeSafe = 0",
        "kMTLMathModeSafe = 1",
        r"MTLMathModeSafe is 0 in Apple's headers",
    ),
    EncoderFault(
        "a PyTorch with concurrent encoders",
        "id concurrent(Buffer* buffer) { return [buffer computeCommandEncoderWithDispatchType:1]; }",
        r"torch 0 may open concurrent encoders: it has computeCommandEncoderWithDispatchType:",
    ),
    LinkFault(
        "a newer minimum of macOS",
        lambda command, work: set_in(command, "14.0", "15.0"),
        r"version \(15, 0\), and should be for macOS \(14, 0\)",
    ),
    LinkFault("a library of the build machine's", add_library, r"loads /opt/homebrew/lib/libextra\.dylib"),
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
        lambda command, work: set_in(command, "-bundle", "-dynamiclib"),
        r"is no bundle, which is what Python loads \(file type 6\)",
    ),
    CLinkFault(
        "a C function that is left out",
        lambda command, work: set_in(command, "_metalcore_*", "_metalcore_[a-r]*"),
        r"libmetalcore\.dylib:(?s:.*)\ndoes not export _metalcore_softmax_float",
    ),
    CLinkFault(
        "a C function that metalcore.h does not declare",
        with_part('extern "C" int metalcore_more() { return 0; }'),
        r"libmetalcore\.dylib:\nexports _metalcore_more",
    ),
    CLinkFault(
        "a use of PyTorch in the library for C",
        with_part(uses("_aoti_torch_get_sizes"), "-Wl,-undefined,dynamic_lookup"),
        r"_aoti_torch_get_sizes is in no library",
    ),
    CLinkFault(
        "a library for C with a path of the build machine's",
        lambda command, work: set_in(command, "@rpath/libmetalcore", "/Users/ci/libmetalcore"),
        r"has the install name /Users/ci/libmetalcore\.dylib, not @rpath/libmetalcore\.dylib",
    ),
    FileFault("a byte changed after signing", flip, r"code signature: page \d+ is not what was signed"),
    FileFault("no code signature", unsign, r"code signature: there is none"),
    WheelFault(
        "a tag that older Macs take",
        rename("macosx_14_0", "macosx_13_0"),
        r"pip takes it on macosx_13_0_arm64 with Python 3\.10",
    ),
    WheelFault(
        "a tag for one Python",
        rename("cp310-abi3", "cp311-cp311"),
        r"pip does not take it on macosx_14_0_arm64 with Python 3\.12",
    ),
    WheelFault(
        "metadata for newer Pythons only",
        require_python(">=3.12"),
        r"pip does not take it on macosx_26_0_arm64 with Python 3\.11",
    ),
    WheelFault(
        "a kernel left out",
        without("metalcore/lib/metal/activation/softmax.metal"),
        r"metalcore/lib/metal/activation/softmax\.metal is missing",
    ),
    WheelFault(
        "the library for C left out",
        without("metalcore/lib/libmetalcore.dylib"),
        r"metalcore/lib/libmetalcore\.dylib is missing",
    ),
    WheelFault(
        "a kernel with an include",
        with_file("metalcore/lib/metal/activation/softmax.metal", b'#include "softmax.h"\n'),
        r"softmax\.metal includes a file",
    ),
    WheelFault(
        "a Linux binary",
        with_file("metalcore/lib/x86-64/activation/softmax.so", b"\x7fELF"),
        r"metalcore/lib/x86-64/activation/softmax\.so is a binary for Linux",
    ),
    WheelFault(
        "a file that RECORD does not know",
        with_file("metalcore/stray.py", b""),
        r"RECORD does not match metalcore/stray\.py",
    ),
    WheelFault(
        "a module of an earlier build",
        with_file("metalcore/stray.py", b""),
        r"metalcore/stray\.py is not in the checkout",
    ),
    WheelFault(
        "a module that is not the checkout's",
        with_file("metalcore/activation/_softmax.py", b""),
        r"metalcore/activation/_softmax\.py is not the checkout's",
    ),
]
