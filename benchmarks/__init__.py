"""The benchmarks of the source checkout: `python -m metalcore bench`. See README.md beside this file."""
