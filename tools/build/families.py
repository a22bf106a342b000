"""The families of built-in kernels: one a source file, named by its path below kernels/."""

import functools
import hashlib
import re

from .front_end import translate, translator_files
from .places import KERNELS


def families(folder=KERNELS):
    """Returns {family: its source}. The path names a family, as "linalg/qr_simd": two folders may have a file of one
    name."""
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.metal"))}


def with_includes(source, folder=KERNELS, seen=()):
    """Returns a kernel's source and the headers of ours that it includes, directly or not."""
    paths = [source]
    for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', source.read_text(encoding="utf-8"), re.MULTILINE):
        for parent in (source.parent, folder):
            path = parent / name
            if path.exists():
                if path not in seen:
                    paths += with_includes(path, folder, (*seen, source))
                break
    return paths


def translation(source, folder=KERNELS, defines=()):
    """Returns a family as C++ and as CUDA C++. It takes as long as a small family's compilation, and the index, the
    simulator's libraries and the programs for NVIDIA GPUs are all made from it."""
    texts = tuple(path.read_text(encoding="utf-8") for path in with_includes(source, folder))
    return _translation(source, folder, defines, texts)


@functools.cache
def _translation(source, folder, defines, texts):
    return translate(texts[0], include_dirs=[source.parent, folder], filename=str(source), defines=defines)


# Kernels that count on float16's subnormal numbers have a variant that does not, where this macro is 0.
HALF_SUBNORMALS = "METALCORE_HALF_SUBNORMALS"


def has_flushing_variant(source, folder=KERNELS):
    """Returns whether a kernel's source depends on the macro."""
    return any(HALF_SUBNORMALS in path.read_text(encoding="utf-8") for path in with_includes(source, folder))


def kernel_index(tasks, folder=KERNELS):
    """Returns lib/index, which tells the family of each kernel: lines of a family and the names of its kernels. And
    lib/digests, lines of a family and a digest of its source: whether a program's file means the same kernels."""
    sources = families(folder)
    inputs = [path for source in sources.values() for path in with_includes(source, folder)]
    return [
        tasks.add(
            "lib/index",
            [*inputs, *translator_files()],
            list(sources),
            lambda output: output.write_text(_index(sources, folder)),
        ),
        tasks.add("lib/digests", inputs, list(sources), lambda output: output.write_text(_digests(sources, folder))),
    ]


def _digests(sources, folder):
    """The path of a file is none of its content, so that a Mac's build has the digests of a Linux machine's."""
    lines = []
    for family, source in sources.items():
        combined = hashlib.sha256()
        for path in with_includes(source, folder):
            content = path.read_bytes()
            combined.update(len(content).to_bytes(8, "little") + content)
        lines.append(f"{family} {combined.hexdigest()}\n")
    return "".join(lines)


def _index(sources, folder):
    """Raises RuntimeError where two kernels have one name: a kernel is found by its name alone."""
    lines, source_of = [], {}
    for family, source in sources.items():
        names = [kernel.name for kernel in translation(source, folder).kernels]
        for name in names:
            if name in source_of:
                raise RuntimeError(f"two kernels are named '{name}', in {source_of[name]} and in {source}")
            source_of[name] = source
        lines.append(" ".join([family, *names]) + "\n")
    return "".join(lines)
