"""Limits of Metal, and limits of Clang that Metal's compiler has too."""

MAX_INDEX = 30  # of buffers and of threadgroup arguments
MAX_CONSTANT_INDEX = 65535  # of function constants
MAX_THREADS = 1024  # of a threadgroup
MAX_THREADGROUP_MEMORY = 32768  # bytes
MAX_GRID = 2**32 - 1  # threads in a direction
MAX_NESTING = 256  # brackets in brackets
MAX_INCLUDE_DEPTH = 200
