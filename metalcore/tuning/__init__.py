"""Measures where one way to run an op becomes faster than another on the GPU at hand: `python -m metalcore tune`.

workloads.py says what is timed, search.py times it and finds the best values, and store.py keeps them.
"""
