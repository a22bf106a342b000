"""Signatures: what a launch on CUDA binds and how, as text (see cuda_source.py). A kernel is compiled for a
signature."""

_SCALARS = {
    "bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "half", "bfloat", "float", "size_t",
    "unsigned", "unsigned int", "unsigned long", "int32_t", "uint32_t", "int64_t", "uint64_t",
}  # fmt: skip


def of_call(buffers, lengths):
    """Returns the signature of a call with these buffers (each an (address, size), bytes or a list) and lengths of
    threadgroup arguments, as csrc/backends/cuda/kernels.h makes it."""
    addresses, values = [], []
    for i, buffer in enumerate(buffers):
        if isinstance(buffer, tuple):
            addresses.append(f"b{i}")
        elif buffer is not None:
            size = len(buffer) if isinstance(buffer, bytes) else 8 * len(buffer)
            values.append(f"i{i}:{_capacity(size)}")
    return ",".join([*addresses, *(f"t{i}" for i in range(len(lengths))), *values])


def shape_bytes(rank):
    """Returns how many bytes tell a tensor's shape (see metal/tensor_argument.h)."""
    return 16 + 16 * rank


def _capacity(size):
    return max(16, (size + 15) // 16 * 16) if size <= 256 else 1 << (size - 1).bit_length()


def probable(arguments):
    """Returns the signature that calls will probably have. The arguments are dicts of kernels.Argument: an argument
    that is passed by reference and not written to is bound as bytes."""
    parts = {"b": [], "t": [], "i": []}
    for argument in sorted(arguments, key=lambda argument: argument["index"]):
        index, type = argument["index"], argument["type"]
        if argument["kind"] == "threadgroup":
            parts["t"].append(f"t{index}")
        elif type and not argument["is_writable"]:
            parts["i"].append(f"i{index}:{16 if type in _SCALARS else 0}")
        else:
            parts["b"].append(f"b{index}")
        if argument["tensor"]:
            parts["i"].append(f"i{argument['tensor'][0]}:{_capacity(shape_bytes(argument['tensor'][2] or 2))}")
    return ",".join(parts["b"] + parts["t"] + parts["i"])
