"""Kernels that register_gate.py does not hold to Apple's registers. A pattern is a regular expression for whole names."""

# Kernels that no plan of an Apple family takes: {pattern: what takes them}. tests/msl/test_register_gate.py plans every
# op for each of these families, and finds none of them.
NVIDIA = {}

# Kernels that plans of Apple families take, and that do not fit: {pattern: why}. One that fits must leave this list.
OVER = {
    r"attention_(forward|dq|dkv|decode|decode_matrices)_.*": "under work",
}
