"""Whether the built-in kernels fit the registers and the threadgroup memory of Apple's GPUs, without one:

    python -m tools.register_gate                    # a table of all kernels; exit status 1 where one does not fit
    python -m tools.register_gate linalg gemm/gemm   # the files whose path below kernels/ begins so
    python -m tools.register_gate gemm --free        # the registers that kernels take where nothing bounds them
    python -m tools.register_gate attention/dq --kernels attention_dq_narrow_64_half    # these of the file alone
    python -m tools.register_gate --record           # those that changed since register_gate.json; it then has them

A thread of an Apple GPU has at most 128 registers of 32 bits, and fewer where a threadgroup has many threads: a
pipeline for 1024 threads leaves each of them 52. What these cannot hold spills to memory, which is slow, and Metal
gives a kernel without a promise fewer threads. Apple's compiler does not run here, so NVRTC stands for it: it compiles
each kernel for compute capability 9.0 with the registers that Apple's GPUs have for the threads that the kernel
promises (`[[max_total_threads_per_threadgroup]]`). A kernel fits if nothing of it lies in local memory then. A compiler
that is not short of registers uses them freely, so that their number alone says little, and only this bound is fair.

It is a proxy, and no proof: both GPUs have registers of 32 bits and the same values that are alive at once, but
another scheduler, and another layout of matrices. What NVIDIA and OVER list need not fit. Of that, kernels that
only NVIDIA GPUs run are not measured at all: those GPUs are there to be timed on, where a few bytes that spill may be
faster than a smaller tile, so that a bound says nothing. They must compile, and so fit in 48 KiB of threadgroup memory.
The same holds for a kernel of bfloats whose twin of halves is measured: the twin has the same values in registers.

To compile all takes seven minutes of a core, and the same text with the same compiler gives the same registers. So
register_gate.json has, by file, a digest of what its kernels were compiled from when they last fitted, and when they
last compiled for GPUs with other compute capabilities; the tests compile the files whose digest differs.
"""

import argparse
import dataclasses
import functools
import json
import re
import subprocess
import sys
from pathlib import Path

from metalcore.estimates.chips import OCCUPANCY
from metalcore.msl.runtime import resources

from .build.families import with_includes

KERNELS = Path(__file__).resolve().parents[1] / "kernels"
RECORD = Path(__file__).with_suffix(".json")  # {file of kernels: digest() when they fitted}
LEAST_THREADS = OCCUPANCY[-1][1]  # what Metal grants a kernel that promises nothing
THREADGROUP_MEMORY = 32 * 1024
# These are compiled for all compute capabilities, whatever is recorded.
EVERYWHERE = ("activation/softmax", "attention/forward", "linalg/qr_simd")
_MOST = 255  # registers of a thread of NVIDIA's GPUs
_INCLUDED = re.compile(r'^#include ["<]([^">]+)', re.MULTILINE)
_NO_CODE = re.compile(r"^#line .*\n|//.*|^\s*\n", re.MULTILINE)

# What follows is not held to Apple's registers. The patterns are regular expressions for names of kernels.
# Kernels that no plan of an Apple family takes: {pattern: what takes them}. tests/msl/test_register_gate.py plans every
# op for each of these families, and finds none of them. The docstring above says why nothing bounds their registers.
NVIDIA = {
    r"gemm_(float|half|bfloat)": "gemm.short_steps is off",
    r"(gemm|conv2d)_unit_.*|conv2d_order(_packs)?": "gemm.units is on",
    r"quant_mv4_.*": "quant.mv_x_rows is 4",
    r"quant_tiles.*": "quant.tiles_rows is not 0",
    r"quant_unit_.*": "quant.unit_rows is not 0",
    r"rms_norm_split_.*": "norm.few_registers is off",
    r"(rms|layer)_norm_backward_(block[1248]|split|split_sums)_(?!512).*": "norm.few_registers is off",
    r"layer_norm_block8_(aligned_)?float": "norm.few_registers is off",
    r"svd_simd_32x32|svd_block_64": "jacobi.few_registers is off",
    r"trsm_block_\d+": "triangular.few_registers is off",
    r"qr_simd_(64|complex_32)x.*": "qr.simd_rows is 64",
    r"eigh_ql_complex_(values_)?32": "jacobi.few_registers is off",
    r"attention_(forward|dq|dkv)_\d+_.*": "attention.narrow_forward, narrow_dq and narrow_dkv are on",
    r"attention_(forward|dq|dkv)_unit_.*": "attention.units is on",
    r"gated_delta_rule_((walk|walk_back|chunks)_unit|inverse_parts)_.*": "delta_rule.units is on",
    r"attention_decode_(matrices_)?\d+x\d+_.*": "attention_decode.narrow is on",
    r"attention_decode_lanes\d+_.*": "attention_decode.lanes is off",
}

# Kernels that plans of Apple families take, and that do not fit: {pattern: why}. One that fits must leave this list.
OVER = {
    r"gemm_short_float|conv2d_(packs|elements)_float": "the proxy's fault: on CUDA a product of float32 matrices is a "
    "sum of products of bfloats, whose parts take the registers; on Apple GPUs it is one instruction",
    r"qr_block_complex_(128|256|512|1024)": "a thread holds 32 complex numbers, and 256 to 272 bytes of the rest spill",
    r"(eigh|svd)_complex_block_(values_)?128": "a thread holds 32 complex numbers, and 24 to 48 bytes more spill",
    r"lu_simd_complex_32x(4|16)": "a lane holds up to 48 complex numbers, and 16 to 40 bytes spill",
    r"trsm_simd_complex_32x(16|32)": "a lane holds 32 complex numbers, and 120 bytes of the rest spill",
    r"syrk|trsm_update|attention_decode_narrow_general_576x4_float": "8 bytes spill",
    r"attention_forward_narrow_general_256_half": "16 bytes spill",
    r"svd_block_128": "a thread holds 64 numbers of A and V, and 40 bytes of the rest spill",
    r"attention_forward_narrow_(general_)?256_float|attention_dq_narrow_(general_)?256_half"
    r"|attention_dq_narrow_(192|general_256)_float|attention_d[kv]_narrow_general_192_float": "the "
    "proxy's fault, as above: a lane holds 48 or 64 sums, and 24 to 120 bytes of the products' parts spill",
    r"gated_delta_rule_chunks_(float|half)": "the proxy's fault, as above: a lane holds 32 sums, and 16 bytes "
    "spill, and with one multiplication in the place of the parts none",
    r"gated_delta_rule_inverse_float": "the proxy's fault, as above: 40 bytes spill",
    r"gated_delta_rule_walk_(back_)?(128x32|128x16|256x16)_(float|half|bfloat)": "the proxy's fault, as above: a "
    "lane holds 32 numbers of the state and as many sums, and 8 to 208 bytes of the products' parts spill",
    r"linear_scan_(walk_(added|results|(back_)?derivative)|pairs)_(float|half|bfloat)"
    r"|linear_scan_(walk_back_added|keys)_float|linear_scan_queries_half": "the proxy's fault, as above: a lane holds "
    "64 numbers of the state, or 64 sums, and 8 to 416 bytes of the products' parts and of the next rows spill",
    r"attention_decode_narrow_576x4_(half|bfloat)": "a lane holds 64 sums, 12 words of a key and 8 of its value, and 8 "
    "bytes of the rest spill",
}


def budget(promised):
    """Returns the registers of 32 bits that a thread of an Apple GPU has, in a kernel that promises so many threads or
    none."""
    return max(halves for halves, threads in OCCUPANCY if threads >= (promised or LEAST_THREADS)) // 2


@dataclasses.dataclass(frozen=True)
class Use:
    """What a kernel uses with the registers of Apple's GPUs."""

    kernel: str
    threads: int  # promised, or 0
    budget: int  # registers
    registers: int | None  # None where the kernel is not measured
    local_bytes: int | None  # of a thread: what was spilled, and arrays that are indexed at run time
    threadgroup_bytes: int

    @property
    def fits(self):
        return self.registers is None or not self.local_bytes and self.threadgroup_bytes <= THREADGROUP_MEMORY

    @property
    def fault(self):
        """What is wrong, or ""."""
        reason = reason_of(self.kernel, OVER)
        if self.fits:
            return f"it fits, and OVER lists it: {reason}" if reason else ""
        if reason and self.threadgroup_bytes <= THREADGROUP_MEMORY:
            return ""
        return (
            f"{self.local_bytes} bytes of a thread lie in local memory with {self.budget} registers, and a threadgroup "
            f"has {self.threadgroup_bytes} bytes"
        )

    def __str__(self):
        note = reason_of(self.kernel, NVIDIA | OVER)
        mark = "  over" if self.fault else f"  listed: {note}" if note else ""
        registers, local_bytes = ("-" if number is None else number for number in (self.registers, self.local_bytes))
        return (
            f"{self.kernel:56} {self.threads or '-':>7} {self.budget:>6} {registers:>9} {local_bytes:>11} "
            f"{self.threadgroup_bytes:>17}{mark}"
        )


def reason_of(kernel, entries):
    """Returns the reason of the first entry whose pattern is the kernel's whole name, or ""."""
    return next((reason for pattern, reason in entries.items() if re.fullmatch(pattern, kernel)), "")


HEADING = f"{'kernel':56} threads budget registers local bytes threadgroup bytes"


def families(prefixes=("",)):
    """Returns the files of kernels, as paths below kernels/ without the suffix."""
    names = (path.relative_to(KERNELS).with_suffix("").as_posix() for path in KERNELS.rglob("*.metal"))
    return sorted(name for name in names if name.startswith(tuple(prefixes)))


def uses(family, free=False, kernels=None):
    """Returns what the kernels of a file use, each with its budget of registers, or with as many as it takes. `kernels`
    names the only ones of them that matter."""
    source, places = _file(family)
    return uses_of(source, free, kernels, **places)


def _file(family):
    path = KERNELS / f"{family}.metal"
    return path.read_text(encoding="utf-8"), {"include_dirs": [path.parent, KERNELS], "filename": str(path)}


def _translated(source, **places):
    from metalcore.msl.language.translate import translate

    return translate(source, **places)  # as the package has it: without guards for pointers that are not aligned


def uses_of(source, free=False, kernels=None, **places):
    translation = _translated(source, **places)
    described = translation.cuda_kernels()
    if kernels:
        described = {name: kernel for name, kernel in described.items() if name in kernels}
    promised = {name: kernel["max_total_threads"] for name, kernel in described.items()}
    bounds, unmeasured = _bounds(promised, free)
    usage = resources.of(translation, described, bounds)
    for name, (*_, threadgroup_bytes) in resources.of(translation, described, unmeasured, *fast()).items():
        usage[name] = None, None, threadgroup_bytes
    uses = {name: Use(name, promised[name], budget(promised[name]), *usage[name]) for name in described}
    over = [name for name, use in uses.items() if not (use.fits or free or reason_of(name, OVER))]
    if over:  # a compiler that is told of a bound may choose worse than without
        for name, (registers, local_bytes, _) in resources.of(translation, described, dict.fromkeys(over)).items():
            use = dataclasses.replace(uses[name], registers=registers, local_bytes=local_bytes)
            uses[name] = use if use.fits and registers <= use.budget else uses[name]
    return list(uses.values())


def _bounds(promised, free=False):
    """Returns ({kernel: registers that it may have}, {kernel that is not measured: None}) of {kernel: threads}."""
    unmeasured = {} if free else dict.fromkeys(name for name in promised if _is_unmeasured(name, promised))
    measured = {name: threads for name, threads in promised.items() if name not in unmeasured}
    return {name: _MOST if free else budget(threads) for name, threads in measured.items()}, unmeasured


def other_capabilities(family):
    """Returns the compute capabilities other than 9.0 for which a kernel of a file must compile. Only <metal_stdlib>'s
    headers have other code for GPUs before 8.0, above all for matrices; GPUs after these differ in the assembler
    alone."""
    sources = with_includes(KERNELS / f"{family}.metal", KERNELS)
    has_matrices = any("simdgroup_matrix" in _code(path) for path in sources)
    is_first = family == families([family.partition("/")[0] + "/"])[0]
    return [75] * (has_matrices or is_first) + [80, 100] * (family in EVERYWHERE)


def compile_for(family, capability):
    """Compiles one kernel of a file for a compute capability. Raises an MSLError where it does not compile."""
    from metalcore.msl.nvidia import nvrtc

    source, places = _file(family)
    translation = _translated(source, **places)
    described = translation.cuda_kernels()
    # The architectures differ most in bfloat.
    kernel = next((name for name in described if "bfloat" in name), next(iter(described)))
    text, _ = resources.source(translation, described, {kernel: None})
    nvrtc.find().compile(text, capability, flags=(*resources.FLAGS, *fast()), msl=source)


def faults(family, uses):
    """Returns what is wrong with the kernels of a file, as text. What NVRTC compiled before in a process changes its
    choice of registers by a few: a new process decides about those that do not fit."""
    over = [use.kernel for use in uses if use.fault]
    if not over:
        return ""
    command = [sys.executable, "-m", "tools.register_gate", family, "--kernels", *over]
    alone = subprocess.run(command, cwd=KERNELS.parent, capture_output=True, text=True)
    return alone.stdout + alone.stderr if alone.returncode else ""


def recorded(path=RECORD):
    """Returns {file of kernels: its digest when it was right}."""
    return json.loads(path.read_text(encoding="utf-8"))


def write_record(record, path=RECORD):
    """Writes it without the files that are gone."""
    current = {family: record[family] for family in families() if family in record}
    path.write_text(json.dumps(current, indent=0) + "\n", encoding="utf-8")


def digest(family):
    """Returns a digest of all that decides whether the kernels of a file fit."""
    source, places = _file(family)
    return digest_of(source, **places)


def digest_of(source, **places):
    from metalcore.msl import cache
    from metalcore.msl.nvidia import nvrtc

    translation = _translated(source, **places)
    described = translation.cuda_kernels()
    bounds = _bounds({name: kernel["max_total_threads"] for name, kernel in described.items()})
    texts = [_NO_CODE.sub("", resources.source(translation, described, some)[0]) for some in bounds]
    texts += [text for path in sorted(_headers(texts[0])) for text in (path.name, _code(path))]
    over = [name for name in described if reason_of(name, OVER)]
    return cache.digest(*texts, *over, *resources.FLAGS, *fast(), str(nvrtc.find().version))[:16]


def _headers(text):
    """Returns the files below msl/include that CUDA C++ includes."""
    from metalcore.msl.nvidia.nvrtc import INCLUDE

    found, texts = set(), [text]
    while texts:
        paths = {folder / name for name in _INCLUDED.findall(texts.pop()) for folder in (INCLUDE, INCLUDE / "cuda")}
        added = {path for path in paths - found if path.is_file()}
        texts += map(_code, added)
        found |= added
    return found


@functools.cache
def _code(path):
    return _NO_CODE.sub("", path.read_text(encoding="utf-8"))


def _is_unmeasured(kernel, described):
    twin = re.sub(r"bfloat(?=_|$)", "half", kernel)
    if reason_of(kernel, NVIDIA) or twin == kernel or twin not in described:
        return bool(reason_of(kernel, NVIDIA))
    return not reason_of(twin, OVER) and not reason_of(twin, NVIDIA)


def fast():
    """Returns NVRTC's flags where the speed of the kernels does not matter: it is several times as fast with much that
    is unrolled, and finds the same errors."""
    from metalcore.msl.nvidia import nvrtc

    return ("--Ofast-compile=mid",) if nvrtc.find().version >= (13, 0) else ()


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prefixes", nargs="*", default=[""])
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--kernels", nargs="+", help="measure these kernels of the files alone")
    how.add_argument("--free", action="store_true", help="bound the registers by nothing, and judge nothing")
    how.add_argument("--record", action="store_true", help="measure the files that changed, and record those that fit")
    options = parser.parse_args(arguments)
    if options.record:
        return _record(options.prefixes)
    wrong = []
    print(HEADING)
    for family in families(options.prefixes):
        for use in uses(family, options.free, options.kernels):
            print(use, flush=True)
            wrong += [f"{use.kernel}: {use.fault}"] * bool(use.fault and not options.free)
    print(*wrong, f"{len(wrong)} kernels fail", sep="\n")
    return 1 if wrong else 0


def _record(prefixes):
    from metalcore.msl.nvidia import nvrtc

    record, wrong = recorded(), []
    changed = {family: now for family in families(prefixes) if record.get(family) != (now := digest(family))}
    for family, now in changed.items():
        print(family, flush=True)
        for capability in {*other_capabilities(family)} & {*nvrtc.find().architectures()}:
            compile_for(family, capability)
        if found := faults(family, uses(family)):
            wrong.append(found)
        else:
            record[family] = now
        write_record(record)
    print(*wrong, f"{len(changed) - len(wrong)} files recorded", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
