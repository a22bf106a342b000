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
        "numbers of threads, and the sizes at which PyTorch's own op or the CPU is faster. Then times each override "
        "beside PyTorch's own op, which decides whether it is on by default. Writes what it found into the cache "
        "directory, where later processes find it. METALCORE_TUNING=0 leaves it out.",
        epilog="example: python -m metalcore tune --quick --share",
    )
    devices.add_option(parser)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and samples, in a minute")
    parser.add_argument(
        "--only",
        metavar="WORD",
        action="append",
        default=[],
        help="only fields with this word in TABLE.FIELD, overrides with it in overrides.NAME, or what concerns the op "
        "of this name; may be given several times",
    )
    parser.add_argument(
        "--gpu",
        metavar="CHIP",
        help="measure and write nothing: print what estimates say for an Apple GPU that is not here, such as m1 or "
        "m3-max, as a table",
    )
    parser.add_argument("--share", action="store_true", help="then print a short text for an issue of the project")
    parser.add_argument("--forget", action="store_true", help="measure nothing: remove what was measured on this GPU")
    parser.set_defaults(run=run)


def run(arguments):
    if arguments.gpu:
        return _by_estimates(arguments)
    device_type = devices.use(arguments.device or devices.default())
    from ..overrides import _timing as overrides
    from ..tuning import search, store, workloads

    gpu = store.this_gpu(device_type)
    if gpu is None:
        raise ValueError(f"there is no {device_type} GPU here")
    if arguments.forget:
        print(f"removed {gpu.path}" if store.forget(gpu) else "nothing was measured on this GPU")
        return
    values = store.present(gpu) if arguments.only else {}
    gains = store.present_gains(gpu) if arguments.only else {}
    store.use(gpu, values)
    scale = workloads.SIMULATED if _is_simulated() else workloads.QUICK if arguments.quick else workloads.FULL
    names = [name for name in overrides.names() if _wanted(f"overrides.{name}", name, arguments.only)]
    planned = _planned(search.tunables(device_type), arguments.only, scale, names)
    seconds, rounds, sample_seconds = QUICK if arguments.quick else FULL
    clock = search.Clock(device_type, rounds, sample_seconds)
    print(f"{gpu.name}: {len(planned)} fields and {len(names)} overrides, at most {seconds} s and what compiling takes")
    tuner = search.Search(gpu, clock, values, _progress if sys.stderr.isatty() else lambda text: None)
    outcomes = []
    begin = time.monotonic()
    try:
        for number, (tunable, calls) in enumerate(planned):
            now = time.monotonic()
            share = max(0.0, begin + seconds - now) / (len(planned) - number)
            outcomes.append(tuner.tune(tunable, calls, now + share))
            _clear()
            print(f"[{number + 1:{len(str(len(planned)))}}/{len(planned)}] {_line(outcomes[-1])}", flush=True)
        store.use(gpu, tuner.values)
        measured = []
        for name in names:
            _progress(f"overrides.{name}") if sys.stderr.isatty() else None
            measured.append(overrides.measure(name, device_type, clock))
            gains[name] = measured[-1].inference, measured[-1].training
            _clear()
            print(f"{'overrides.' + name:<42} {measured[-1]}", flush=True)
    except KeyboardInterrupt:
        _clear()
        print("stopped: nothing was written", file=sys.stderr)
        raise
    today = datetime.date.today().isoformat()
    path = store.save(gpu, tuner.values, today, gains)
    changed = [outcome for outcome in outcomes if outcome.changed]
    print(f"\n{len(changed)} of {len(outcomes)} fields changed; later processes use {path}")
    if arguments.share:
        print("\n" + share_text(gpu, outcomes, today, measured, tuner.times()))


def _by_estimates(arguments):
    devices.use("simulator")
    from ..estimates import chips, counting, tuning
    from ..tuning import search, store

    chip = chips.find(arguments.gpu)
    with counting(family=chip.family, cores=chip.cores, events=tuning.EVENTS, whole=0):
        gpu = store.GPU("mps", f"{chip.name}, {chip.cores} cores, by estimate")
        tunables = [t for t in search.tunables("mps") if t.kind != "regions" and t.name not in tuning.FIELDS_LEFT_OUT]
        planned = [
            (tunable, [call for call in calls if call.op not in tuning.OPS_LEFT_OUT])
            for tunable, calls in _planned(tunables, arguments.only, tuning.SCALE)
        ]
        store.use(gpu, {})
        progress = _progress if sys.stderr.isatty() else lambda text: None
        tuner = search.Search(gpu, tuning.EstimateClock(chip), {}, progress)
        outcomes = []
        for number, (tunable, calls) in enumerate(planned):
            outcomes.append(tuner.tune(tunable, calls))
            _clear()
            print(f"[{number + 1}/{len(planned)}] {_line(outcomes[-1])}", flush=True)
    print("\n" + share_text(gpu, outcomes, datetime.date.today().isoformat(), found="estimated"))


def _wanted(name, op, words):
    return not words or op in words or any(word in name for word in words)


def _planned(tunables, words, scale, overrides=()):
    """Returns (field, the calls that are timed for it) of each field that is asked for."""
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
    if not planned and not overrides:
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


def share_text(gpu, outcomes, date, overrides=(), times=(), found="measured"):
    """Returns what was measured, as a short text in Markdown."""
    import torch

    from .._system import __version__
    from ..tuning.search import text

    lines = [
        f"Tuning of {gpu.name} (family {gpu.family or 'unknown'}), {date}",
        f"metalcore {__version__}, PyTorch {torch.__version__}, {platform.platform()}",
        "",
        f"| field | before | {found} | less time |",
        "| --- | --- | --- | --- |",
    ]
    for outcome in outcomes:
        if outcome.calls:
            gain = f"{outcome.gain:.0%}" if outcome.changed else ""
            each = outcome.tunable.per_core
            before = text(outcome.tunable.value) + (f" ({each} a core)" if each else "")
            lines.append(f"| {outcome.tunable.name} | {before} | {text(outcome.value)} | {gain} |")
    if overrides:
        lines += ["", "| override | inference | training |", "| --- | --- | --- |"]
    for gain in overrides:
        training = "" if gain.training is None else f"{gain.training:.2f}"
        lines.append(f"| {gain.name} | {gain.inference:.2f} | {training} |")
    if times:
        lines += ["", "| call | ms |", "| --- | --- |"]
    lines += [f"| {call.text()} | {seconds * 1e3:.4g} |" for call, seconds in times]
    return "\n".join(lines)


def _progress(text):
    print(f"\r\033[K{text[:110]}", end="", file=sys.stderr, flush=True)


def _clear():
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
