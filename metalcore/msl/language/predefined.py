"""What Apple's compiler has before a program begins: its predefined macros and its headers."""

# The macros that Apple's compiler predefines for `-std=metal3.1` on a Mac.
PREDEFINED = {
    "__METAL__": "1",
    "__METAL_VERSION__": "310",
    "__METAL_MACOS__": "1",
    "__METAL_MEMORY_SCOPE_SYSTEM__": "3",
    "__HAVE_BFLOAT__": "1",
    "__HAVE_SIMDGROUP_MATRIX__": "1",
    "__HAVE_SIMDGROUP_BARRIER__": "1",
    "__HAVE_SIMDGROUP_REDUCTION__": "1",
    "__HAVE_QUADGROUP_FUNCTION__": "1",
    "__HAVE_ATOMIC_ULONG__": "1",
    "__HAVE_ATOMIC_ULONG_MIN_MAX__": "1",
    "__HAVE_NATIVE_INT64__": "1",
    "__APPLE__": "1",
    "__MACH__": "1",
    "__ENVIRONMENT_MAC_OS_X_VERSION_MIN_REQUIRED__": "140000",
    "__LITTLE_ENDIAN__": "1",
    "__clang__": "1",
    "__clang_major__": "17",
    "__clang_minor__": "0",
    "__clang_patchlevel__": "0",
    "__GNUC__": "4",
    "__GNUC_MINOR__": "2",
    "__cplusplus": "201703L",
    "__CHAR_BIT__": "8",
    "__FLT16_MAX__": "65504.0h",  # GCC's own has a suffix that MSL does not have
    "__has_attribute(x)": "1",
    "__has_builtin(x)": "0",
    "__has_feature(x)": "0",
    "__has_extension(x)": "0",
    "__has_cpp_attribute(x)": "1",
}

# `<metal_stdlib>` and every header that it includes. Translated code gets all of them from its target's prelude.h.
STANDARD_HEADERS = frozenset(
    "metal_" + name
    for name in (
        "stdlib algorithm array atomic cmath color command_buffer common compute config complex curves depth "
        "extended_vector function_constant geometric graphics imageblocks integer initializer_list interpolate limits "
        "logging math matrix mesh numeric numeric_limits pack packing pixel pull_model quadgroup raster_order_group "
        "raytracing reference_wrapper relational simdgroup simdgroup_matrix stdint stdlib_extras tessellation texture "
        "tuple type_traits types uniform utility vector visible_function_table work_distribution assert barrier "
        "cooperative_tensor tensor performance_primitives"
    ).split()
) | {
    "simd/simd.h",
    "simd/types.h",
    "simd/vector_types.h",
    "simd/matrix_types.h",
    "simd/vector.h",
    "simd/matrix.h",
    "metal_types",
    "TargetConditionals.h",
    "stdint.h",
    "cstdint",
    "stddef.h",
    "cstddef",
    "limits.h",
    "float.h",
}
