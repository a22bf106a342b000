"""What the Python side of every op shares: which calls metalcore takes, how its operators are registered, and the
registry of its ops."""
