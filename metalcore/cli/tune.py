"""python -m metalcore tune: measures on this machine where kernels take over from each other."""

from __future__ import annotations

import datetime
import platform
import sys
import time

from . import devices

# Seconds for all fields together, the samples of a call, and the seconds of a sample.
QUICK = (50, 5, 0.002)
FULL = (900, 9, 0.01)


def add_parser(commands):
    parser = commands.add_parser(
        "tune",
        help="measure which kernels are fastest on this machine's GPU, for all later processes",
        description="Times every number of the tuning tables on the GPU: sizes at which another kernel takes over, "
        "numbers of threads, and the sizes at which PyTorch's own op or the CPU is faster. Writes the fastest values "
        "into the cache directory, where later processes find them. METALCORE_TUNING=0 leaves them out.",
        epilog="example: python -m metalcore tune --quick --share",
    )
    devices.add_option(parser)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and samples, in a minute")
    parser.add_argument(
        "--only",
        metavar="WORD",
        action="append",
        default=[],
        help="only fields with this word in TABLE.FIELD, or calls of the op of this name; may be given several times",
    )
    parser.add_argument("--share", action="store_true", help="then print a short text for an issue of the project")
    parser.add_argument("--forget", action="store_true", help="measure nothing: remove what was measured on this GPU")
    parser.set_defaults(run=run)


def run(arguments):
    device_type = devices.use(arguments.device or devices.default())
    from ..tuning import search, store, workloads

    gpu = store.this_gpu(device_type)
    if gpu is None:
        raise ValueError(f"there is no {device_type} GPU here")
    if arguments.forget:
        print(f"removed {gpu.path}" if store.forget(gpu) else "nothing was measured on this GPU")
        return
    values = store.present(gpu) if arguments.only else {}
    store.use(gpu, values)
    scale = workloads.SIMULATED if _is_simulated() else workloads.QUICK if arguments.quick else workloads.FULL
    planned = _planned(search.tunables(device_type), arguments.only, scale)
    seconds, rounds, sample_seconds = QUICK if arguments.quick else FULL
    clock = search.Clock(device_type, rounds, sample_seconds)
    print(f"{gpu.name}: {len(planned)} fields, at most {seconds} s and what compiling takes")
    found = search.Search(gpu, clock, values, _progress if sys.stderr.isatty() else lambda text: None)
    outcomes = []
    begin = time.monotonic()
    try:
        for number, (tunable, calls) in enumerate(planned):
            now = time.monotonic()
            share = max(0.0, begin + seconds - now) / (len(planned) - number)
            outcomes.append(found.tune(tunable, calls, now + share))
            _clear()
            print(f"[{number + 1:{len(str(len(planned)))}}/{len(planned)}] {_line(outcomes[-1])}", flush=True)
    except KeyboardInterrupt:
        _clear()
        print("stopped: nothing was written", file=sys.stderr)
        raise
    today = datetime.date.today().isoformat()
    path = store.save(gpu, found.values, today)
    changed = [outcome for outcome in outcomes if outcome.changed]
    print(f"\n{len(changed)} of {len(outcomes)} fields changed; later processes use {path}")
    if arguments.share:
        print("\n" + share_text(gpu, outcomes, today))


def _planned(tunables, words, scale):
    """(field, the calls that are timed for it) of each field that is asked for."""
    from ..tuning.workloads import workloads

    calls, planned = {}, []
    for tunable in tunables:
        of_table = calls.setdefault(tunable.table, None) or workloads(tunable.table, scale)
        calls[tunable.table] = of_table
        chosen = of_table
        if words and not any(word in tunable.name for word in words):
            chosen = [workload for workload in of_table if workload.op in words]
        if chosen:
            planned.append((tunable, chosen))
    if not planned:
        names = ", ".join(tunable.name for tunable in tunables)
        raise ValueError(f"--only {' '.join(words)}: no field or op of that name; the fields are {names}")
    return planned


def _is_simulated():
    return "metalcore.simulator" in sys.modules


def _line(outcome):
    from ..tuning.search import text

    value = text(outcome.value)
    if outcome.changed:
        return f"{outcome.tunable.name:<34} {text(outcome.tunable.value)} -> {value}: {outcome.gain:.0%} less time"
    return f"{outcome.tunable.name:<34} {value}: {outcome.note}"


def share_text(gpu, outcomes, date):
    """What was measured, as a short text in Markdown."""
    import torch

    from .. import __version__
    from ..tuning.search import text

    lines = [
        f"Tuning of {gpu.name} (family {gpu.family or 'unknown'}), {date}",
        f"metalcore {__version__}, PyTorch {torch.__version__}, {platform.platform()}",
        "",
        "| field | before | measured | less time |",
        "| --- | --- | --- | --- |",
    ]
    for outcome in outcomes:
        if outcome.calls:
            gain = f"{outcome.gain:.0%}" if outcome.changed else ""
            lines.append(f"| {outcome.tunable.name} | {text(outcome.tunable.value)} | {text(outcome.value)} | {gain} |")
    return "\n".join(lines)


def _progress(text):
    print(f"\r\033[K{text[:110]}", end="", file=sys.stderr, flush=True)


def _clear():
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
