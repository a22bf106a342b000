"""CUDA C++ of a translated program: the prelude, the program, and an entry for each kernel with its bindings.

A *signature* says what a launch binds and how: ``b0,b1,t0,i2:48``. ``b`` is the address of a device buffer, ``t`` the
byte offset of a threadgroup argument in dynamic shared memory, ``i`` bytes inside the parameter block and the room they
take (a multiple of 16, or 0 for exactly one element). The block has the same order: all b by index, all t, all i.
"""

import re

from ..errors import MSLError

# The program is compiled inside this namespace, so that its names hide CUDA's own float4, exp …
NAMESPACE = "metal_program"
# What a program begins with whose lanes hold operands of products, and one with simdgroup_matrix. In a program with
# both each kernel has the first, and the second if NVRTC tells that it multiplies matrices (nvidia/cuda.py).
HOLDS_FRAGMENTS = "#define MSL_FRAGMENT_LANES\n"
HAS_MATRICES = "#define MSL_MATRIX_LANES\n"
_MATRIX = re.compile(r"simdgroup_matrix|simdgroup_(float|half|bfloat)8x8")
_HELD = re.compile(r"get_right_input_cooperative_tensor")
_WAIT = re.compile(r"\bmetalcore_await_earlier_kernels\([^()]*\b0\)")  # kernels/common/earlier.h
_COPIES = re.compile(r"\bmetalcore_(?:copy_pack|prefetch)\(.*\b0\)")  # kernels/common/copies.h
_BINDING = re.compile(r"([bt])(\d+)|(i)(\d+):(\d+)")


def describe(kernels, addresses):
    """Returns what cuda_source() needs to know of each kernel, as plain data that JSON can hold.

    Returns:
        dict: host name -> dict(function, scope, max_total_threads, arguments), an argument being
        [name, kind, index, condition] (see kernels.Argument), and for a tensor also the index of its extents.
    """
    return {
        kernel.name: {
            "function": addresses[kernel.name],
            "scope": list(kernel.named_at.scope),
            "max_total_threads": kernel.max_total_threads,
            "arguments": [[a.name, a.kind, a.index, a.condition, *a.tensor[:1]] for a in kernel.arguments],
        }
        for kernel in kernels
    }


def cuda_source(program, kernels, requests):
    """Returns CUDA C++ with an entry for each request.

    Args:
        program: Translation.program.
        kernels: what describe() gave.
        requests: [(kernel name, signature)].

    Returns:
        (text, entry names). An entry is an extern "C" __global__ function.

    Raises:
        MSLError: an argument of a kernel is bound to nothing, or the signature is malformed.
    """
    entries = [f"metalcore_{i}" for i in range(len(requests))]
    headers = ["cuda/prelude.h", *(["target/tile_copies.h"] if _COPIES.search(program) else [])]
    included = "".join(f'#include "{header}"\n' for header in headers)
    out = [f"namespace {NAMESPACE} {{\n{included}", program, '#line 1 "msl_entries"\n']
    if _HELD.search(program):
        out.insert(0, HOLDS_FRAGMENTS)
    elif _MATRIX.search(program):
        out.insert(0, HAS_MATRICES)
    if _WAIT.search(program):
        out.insert(0, "#define MSL_KERNELS_WAIT\n")
    for entry, (name, signature) in zip(entries, requests):
        out.append(_entry(entry, name, kernels[name], signature))
    return "".join(out) + "}\n", entries


def _entry(entry, name, kernel, signature):
    scope = "::".join(kernel["scope"])
    # The scope is that of the kernel's instantiation, so that its template arguments keep their meaning.
    naming = f"using {entry}_caller = msl::Caller<{kernel['function']}>;"
    naming = f"namespace {scope} {{ {naming} }}" if scope else naming
    caller = f"{scope}::{entry}_caller" if scope else f"{entry}_caller"
    positions = {
        f"{'b' if kind == 'buffer' else 't'}{index}": i
        for i, (_, kind, index, *_) in enumerate(kernel["arguments"])
        if kind in ("buffer", "threadgroup")
    }
    members, bound = _block(name, signature, caller, positions)
    checks, values = _values(name, kernel, scope, bound)
    threads = kernel["max_total_threads"]
    bounds = f"__launch_bounds__({threads}) " if threads else ""
    return (
        f"{naming}\n{checks}"
        f"struct {entry}_block {{ msl::Grid grid; {' '.join(members)} }};\n"
        f'extern "C" __global__ void {bounds}{entry}(const __grid_constant__ {entry}_block block) {{\n'
        f"  {caller}::call({', '.join(['block.grid', *values])});\n}}\n"
    )


def _block(name, signature, caller, positions):
    """Returns the members of the parameter block after the grid, and {"b0" …: C++ for the argument}."""
    members, bound = [], {}
    for part in filter(None, signature.split(",")):
        match = _BINDING.fullmatch(part)
        if match is None:
            raise MSLError(f"kernel '{name}': malformed signature {signature!r} at {part!r}")
        kind, index = match[1] or match[3], match[2] or match[4]
        if kind == "b":
            members.append(f"void* b{index};")
            bound[f"b{index}"] = f"msl::buffer(block.b{index})"
        elif kind == "t":
            members.append(f"uint64_t t{index};")
            bound[f"t{index}"] = f"msl::threadgroup_argument(block.t{index})"
        else:
            capacity = int(match[5])
            if not capacity:
                if f"b{index}" not in positions:
                    continue
                capacity = f"{caller}::room<{positions[f'b{index}']}>()"
            members.append(f"msl::Bytes<{capacity}> i{index};")
            bound[f"b{index}"] = f"msl::bytes(block.i{index})"
    return members, bound


def _values(name, kernel, scope, bound):
    """Returns the C++ for all arguments, and the checks that stand before the entry."""
    checks, values = [], []
    for argument, kind, index, condition, *shape in kernel["arguments"]:
        if kind not in ("buffer", "threadgroup"):
            values.append(f"msl::{kind}()")
            continue
        if condition and scope:
            condition = f"{scope}::{condition}"
        value = bound.get(f"{'b' if kind == 'buffer' else 't'}{index}")
        if value is None:
            missing = f"kernel '{name}': nothing is bound to argument '{argument}' ([[{kind}({index})]])"
            if not condition:
                raise MSLError(missing)
            checks.append(f'static_assert(!bool({condition}), "{missing}");\n')
            value = "msl::absent()"
        elif shape:
            value = f"msl::tensor_argument({value}, {bound[f'b{shape[0]}']})"
        elif condition:
            value = f"msl::given<bool({condition})>({value})"
        values.append(value)
    return "".join(checks), values
