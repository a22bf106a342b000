"""Compares metalcore with the kernels that other projects publish: `python -m benchmarks.peers`.

Their sources are read from checkouts that the user names, and run as they are by metalcore.compile_shader. This package
knows the facts of a call alone: kernels' names, the layout of their arguments, and the sizes of grids.
"""
