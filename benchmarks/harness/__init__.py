"""Times metalcore against PyTorch. A run goes case -> measure -> summary -> report; run.py holds it together."""

__all__ = ["main"]


def main(arguments):
    """Does what `python -m metalcore bench` was asked for with its arguments, and returns the exit status."""
    from . import run

    if arguments.report:
        return run.report_again(arguments)
    if arguments.list:
        print(run.list_cases(arguments))
        return 0
    return run.benchmark(arguments)
