"""The parts that the Python side of every op shares: which calls metalcore takes, how it registers operators, and the
registry of ops."""
