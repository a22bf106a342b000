"""Kernels that register_gate.py does not hold to Apple's registers. A pattern is a regular expression for names."""

# Kernels that no plan of an Apple family takes: {pattern: what takes them}. tests/msl/test_register_gate.py plans every
# op for each of these families, and finds none of them.
NVIDIA = {
    r"gemm_(float|half|bfloat)": "gemm.short_steps is off",
    r"quant_mv4_.*": "quant.mv_x_rows is 4",
    r"rms_norm_split_.*": "norm.few_registers is off",
    r"(rms|layer)_norm_backward_(block[128]|split|split_sums)_(?!512).*": "norm.few_registers is off",
    r"layer_norm_block8_(aligned_)?float": "norm.few_registers is off",
    r"svd_simd_32x32|svd_block_64": "jacobi.few_registers is off",
    r"trsm_block_.*": "triangular.few_registers is off",
    r"qr_simd_64x.*": "qr.simd_rows is 64",
    r"attention_(forward|dq|dkv)_\d+_.*": "attention.narrow_forward, narrow_dq and narrow_dkv are on",
    r"attention_decode_(matrices_)?\d+x\d+_.*": "attention_decode.narrow is on",
}

# Kernels that plans of Apple families take, and that do not fit: {pattern: why}. One that fits must leave this list.
OVER = {
    r"gemm_short_float|conv2d_(packs|elements)_float": "the proxy's fault: on CUDA a product of float32 matrices is a "
    "sum of products of bfloats, whose parts take the registers; on Apple GPUs it is one instruction",
    r"svd_block_128": "a thread holds 64 numbers of A and V, and 80 bytes of the rest spill",
    r"attention_forward_narrow_(general_256_(float|half)|256_float)|attention_dq_narrow_(general_)?256_half"
    r"|attention_dq_narrow_(192_float|general_256_(float|bfloat))|attention_d[kv]_narrow_general_192_float": "the "
    "proxy's fault, as above: a lane holds 48 or 64 sums, and 24 to 120 bytes of the products' parts spill",
    r"attention_decode_narrow_general_576x4_float": "a lane holds 64 sums, 20 numbers of a key and 16 of its "
    "value, and 8 bytes of the rest spill",
}
