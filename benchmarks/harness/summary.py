"""From samples to figures: medians, quartiles, rates, the share of the physical limit, and whether targets are met."""

from __future__ import annotations

import statistics

from .case import TARGETS, Cell, Comparison, dtype_name


def quartiles(values):
    """Returns {"q1", "median", "q3"} of one number or more, by linear interpolation."""
    if len(values) == 1:
        return dict.fromkeys(("q1", "median", "q3"), values[0])
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"q1": low, "median": middle, "q3": high}


def speedup(ours, theirs):
    """Returns PyTorch's time over ours, round by round, since both sides of a round met the same machine."""
    if len(theirs) == 1 and len(ours) > 1:  # a multiple of another case's time
        theirs = theirs * len(ours)
    return quartiles([b / a for a, b in zip(ours, theirs)])


def limit(bytes_, flops, ceilings, peak="matmul_float32"):
    """Returns (seconds, bound): the least time in which this machine moves the bytes and does the operations, and which
    of the two takes it. (None, None) stands for a case that names neither. `peak` is the ceiling of operations."""
    times = {"memory": bytes_ / ceilings["copy"], "arithmetic": flops / ceilings[peak]}
    bound = max(times, key=times.get)
    return (times[bound], bound) if times[bound] else (None, None)


def identity(family, case):
    facts = {"family": family, "name": case.name, "shape": case.shape, "dtype": dtype_name(case.dtype)}
    if isinstance(case, Cell):
        facts["cell"] = {"n": case.n, "batch": case.batch}
    return facts


def failure(family, case, error):
    """Returns the result of a case that raised."""
    return {**identity(family, case), "error": f"{type(error).__name__}: {error}"}


def summarize(family, case, samples, ceilings, with_targets):
    """Returns the result of a case as plain data: what report.py shows and the JSON file holds."""
    ours = quartiles(samples.ours)
    result = {
        **identity(family, case),
        "method": samples.method,
        "calls": samples.calls,
        "sets": samples.sets,
        "cached": samples.cached,
        "variant": samples.variant,
        "ours": ours,
    }
    if samples.theirs:
        result["theirs"] = quartiles(samples.theirs)
        result["speedup"] = speedup(samples.ours, samples.theirs)
        result["excess"] = ours["median"] - result["theirs"]["median"]
    if samples.theirs_batch is not None:
        result["theirs_batch"] = samples.theirs_batch
    if isinstance(case, Comparison):
        result.update(rates(case, ours["median"], samples.cached, ceilings))
    if with_targets:
        result["targets"] = [check(result, quantity, bound) for quantity, bound in case.targets.items()]
    return result


def rates(case, seconds, cached, ceilings):
    """Returns achieved rates and the share of the limit. Memory is no limit for inputs that come from the cache."""
    least, bound = limit(case.bytes, case.flops, ceilings, case.peak)
    facts = {"bytes": case.bytes, "flops": case.flops, "limit": least, "bound": bound}
    if case.bytes:
        facts["bytes_per_second"] = case.bytes / seconds
    if case.flops:
        facts["flops_per_second"] = case.flops / seconds
    if least and not (cached and bound == "memory"):
        facts["share"] = least / seconds
    return facts


def check(result, quantity, bound):
    """Returns a target with what was found. A quantity that could not be determined does not meet it."""
    if quantity not in TARGETS:
        raise ValueError(f"{quantity!r} is not a target; there are {', '.join(TARGETS)}")
    value = result["ours"]["median"] if quantity == "seconds" else result.get(quantity)
    if isinstance(value, dict):
        value = value["median"]
    met = value is not None and (value >= bound if TARGETS[quantity] == ">=" else value <= bound)
    return {"quantity": quantity, "bound": bound, "found": value, "met": met}
