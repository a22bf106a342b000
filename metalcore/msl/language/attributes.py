"""The attributes that the front end knows. It may erase them or leave them to the compiler behind it.

Compilers ignore attributes that they do not know. An attribute may change the result, so an unknown one is an error.
"""

from ..errors import error_at
from .kernels import BUILTINS
from .syntax import ATTRIBUTE_WORDS
from .tokens import CLOSING

# [[…]] that other modules read, and those that change nothing.
_READ = {*BUILTINS, "kernel", "host_name", "max_total_threads_per_threadgroup", "buffer", "threadgroup", "id",
         "function_constant"}  # fmt: skip
_NO_EFFECT = {
    "maybe_unused", "nodiscard", "noreturn", "deprecated", "fallthrough", "likely", "unlikely", "carries_dependency",
    "no_unique_address", "assume", "always_inline", "noinline", "flatten", "unroll", "unused", "used", "const", "pure",
    "cold", "hot", "user", "required_threads_per_threadgroup", "max_total_threadgroups_per_mesh_grid", "nonnull",
    "returns_nonnull", "warn_unused_result", "noescape", "nomerge", "convergent", "noduplicate", "overloadable",
}  # fmt: skip
# [[…]] of stages and arguments that are not supported. kernels.py refuses them by name where they matter.
_OTHER_STAGES = {
    "texture", "sampler", "stage_in", "payload", "imageblock_data", "intersection_function_table", "position",
    "attribute", "color", "render_target_array_index", "viewport_array_index", "point_size", "clip_distance", "flat",
    "center_perspective", "center_no_perspective", "centroid_perspective", "centroid_no_perspective", "vertex",
    "sample_perspective", "sample_no_perspective", "depth", "stencil", "sample_mask", "front_facing", "point_coord",
    "primitive_id", "sample_id", "vertex_id", "instance_id", "base_vertex", "base_instance", "amplification_id",
    "amplification_count", "barycentric_coord", "invariant", "early_fragment_tests", "raster_order_group", "fragment",
    "mesh", "object", "intersection", "visible", "stitchable", "patch", "position_in_patch", "patch_id", "imageblock",
    "thread_index_in_tile", "index", "ray_data", "origin", "direction", "distance", "accept_intersection",
}  # fmt: skip
# __attribute__((…)) that the compilers know or that change nothing.
_OF_COMPILERS = _NO_EFFECT | {
    "aligned", "packed", "may_alias", "vector_size", "ext_vector_type", "visibility", "malloc", "gnu_inline",
    "artificial", "optnone", "opencl_unroll_hint", "annotate", "availability", "enum_extensibility", "flag_enum",
    "swift_name", "format", "minsize", "nothrow",
}  # fmt: skip


def refuse_unknown_attributes(program):
    """Raises an MSLError at the first attribute that is not known."""
    tokens = program.tokens
    for i, token in enumerate(tokens):
        end = program.attribute_end(i)
        if end is not None:
            _refuse(program, i + 2, end - 2, _READ | _NO_EFFECT | _OTHER_STAGES)
        elif token.text in ATTRIBUTE_WORDS and tokens[i + 1].text == "(":
            _refuse(program, i + 3, program.partner[i + 1] - 1, _OF_COMPILERS)


def _refuse(program, i, end, known):
    tokens = program.tokens
    while i < end:
        if tokens[i].text in CLOSING:
            i = program.partner[i]
        elif tokens[i].kind == "id" and tokens[i + 1].text not in ("::", ":"):
            name = tokens[i].text
            if name not in known and name.strip("_") not in known:
                raise error_at(tokens[i], f"the attribute '{name}' is not supported")
        i += 1
