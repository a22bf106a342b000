"""A user's MSL program, which is translated at most once per machine. Kernels for every device are compiled from it."""

import functools
import json
from pathlib import Path

from .. import cache


class ShaderProgram:
    """A program and the options of its translation.

    Attributes:
        source: the MSL.
        names: the names of its kernels.
        aligned: whether pointers that the program casts keep the alignment of what they read.
        digest: a digest of all this, of the files it includes and of the translator.
    """

    def __init__(self, source, include_dirs, constants, aligned=False):
        self.source = source
        self.aligned = aligned
        self._include_dirs = include_dirs
        self._constants = constants
        self._summary = self._summarize()
        self.names = list(self._summary["kernels"])

    def __repr__(self):
        return f"<program of {len(self.names)} kernels>"

    def arguments(self, kernel):
        """Returns a kernel's buffers and threadgroup arguments, as dicts of kernels.Argument."""
        return self._summary["kernels"][kernel]["arguments"]

    def has_threadgroup_variables(self, kernel):
        return self._summary["kernels"][kernel]["threadgroup_variables"]

    @functools.cached_property
    def translation(self):
        from ..language.translate import translate  # a program that is in the cache does not need it

        return translate(self.source, include_dirs=self._include_dirs, constants=self._constants)

    @functools.cached_property
    def digest(self):
        return cache.digest(self._request(), json.dumps(self._summary["included"]), json.dumps(self.aligned))

    def _request(self):
        """Returns a name for the translation's input, without the content of the files that it includes."""
        constants = repr(sorted(self._constants.items(), key=repr))
        return cache.digest(self.source, json.dumps(self._include_dirs), constants, cache.translator_digest())

    def _summarize(self):
        """Returns the part of the translation that calls need, from the cache if it is there."""

        def make(path):
            kernels = {
                kernel.name: {
                    "arguments": [vars(a) for a in kernel.arguments if a.kind in ("buffer", "threadgroup")],
                    "threadgroup_variables": kernel.has_threadgroup_variables,
                }
                for kernel in self.translation.kernels
            }
            included = {name: cache.digest(text) for name, text in self.translation.included.items()}
            path.write_text(json.dumps({"kernels": kernels, "included": included}))

        def up_to_date(content):
            return all(_file_digest(path) == known for path, known in json.loads(content)["included"].items())

        return json.loads(cache.content(self._request() + ".json", make, accept=up_to_date))


def _file_digest(path):
    try:
        return cache.digest(Path(path).read_text(encoding="utf-8-sig", errors="replace"))
    except OSError:
        return None
