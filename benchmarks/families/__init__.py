"""One module per family: `cases(scale)` lists its cases, its docstring is its title. See harness/case.py."""
