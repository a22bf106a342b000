"""Modules of families. A function with @family returns the cases of one, and its docstring begins with the title."""
