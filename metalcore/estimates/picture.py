"""Estimates as text for a terminal and as SVG: times by resource, and the part of the arithmetic by line."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .figures import Estimate, Step

RESOURCES = {
    "arithmetic": "arithmetic",
    "matrices": "8x8 products",
    "threadgroup": "threadgroup memory",
    "core": "first-level cache",
    "gpu": "second-level cache",
    "memory": "memory",
    "launch": "launch",
}
COLORS = dict(
    zip(RESOURCES, ("#4878a8", "#7f5ba6", "#d08830", "#6a9a4c", "#3f8f83", "#b5504a", "#888888"), strict=True)
)
BAR = 32
LINES = 8


def time_text(seconds: float) -> str:
    """Returns seconds with three digits and a unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def heading(estimate: Estimate) -> str:
    """Returns the estimate and its interval in a line."""
    chip = estimate.chip
    where = f"{chip.name}, {chip.cores} cores"
    if not estimate.steps:
        return f"no dispatch to estimate on {where}"
    if estimate.seconds is None:
        least = max(max(each.times[:-2]) for each in estimate.steps)
        return f"no estimate for {where}, only that it takes about {time_text(least)} or more: {estimate.why}"
    low, high = time_text(estimate.low or 0), time_text(estimate.high or 0)
    return f"estimated {time_text(estimate.seconds)} on {where}, nine in ten between {low} and {high}"


def _merged(estimate: Estimate) -> list[tuple[Step, int, float]]:
    """Returns each kernel's longest dispatch, how many there are, and what they take in all; the longest first."""
    found: dict[str, tuple[Step, int, float]] = {}
    for each in estimate.steps:
        longest, count, total = found.get(each.counted.kernel, (each, 0, 0.0))
        longest = max(longest, each, key=lambda step: step.times.total)
        found[each.counted.kernel] = longest, count + 1, total + each.times.total
    return sorted(found.values(), key=lambda entry: -entry[2])


def text(estimate: Estimate) -> str:
    """Returns the estimate with a bar for each resource of the kernels that take longest."""
    out = [heading(estimate)]
    for each, count, total in _merged(estimate)[:6]:
        groups = f"{each.counted.sampled} of {each.counted.groups} threadgroups counted"
        often = f", {count} times" if count > 1 else ""
        out.append(
            f"{each.counted.kernel}: {time_text(total)}{often}, bound by {RESOURCES[each.times.bound]} ({groups})"
        )
        longest = max(each.times[:-1])
        for name, label in RESOURCES.items():
            seconds = getattr(each.times, name)
            if seconds > 0.01 * longest:
                out.append(f"  {label:<20} {'█' * max(1, round(BAR * seconds / longest)):<{BAR}} {time_text(seconds)}")
    lines = [(place, part) for place, part in estimate.lines.most_common(LINES) if part >= 0.02]
    if lines:
        out.append("instructions by line")
        out += [
            f"  {file}:{line:<6} {'█' * max(1, round(BAR * part)):<{BAR}} {part:.0%}" for (file, line), part in lines
        ]
    if estimate.by_torch:
        out.append(f"not in it: PyTorch's {', '.join(dict.fromkeys(estimate.by_torch))}")
    return "\n".join(out)


def svg(estimate: Estimate) -> str:
    """Returns a picture with the same bars."""
    rows: list[tuple[str, float, str, str]] = []  # text, part of the width, colour, label; no part is a heading
    for each, count, total in _merged(estimate)[:6]:
        rows.append(
            (f"{each.counted.kernel}: {time_text(total)}" + (f", {count} times" if count > 1 else ""), 0, "", "")
        )
        longest = max(each.times[:-1])
        for name, label in RESOURCES.items():
            seconds = getattr(each.times, name)
            if seconds > 0.01 * longest:
                rows.append((label, seconds / longest, COLORS[name], time_text(seconds)))
    rows.append(("instructions by line", 0, "", ""))
    for (file, line), part in estimate.lines.most_common(2 * LINES):
        rows.append((f"{file.rsplit('/', 1)[-1]}:{line}", part, "#4878a8", f"{part:.1%}"))
    height = 20 * len(rows) + 40
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="820" height="{height}"',
        'font-family="sans-serif" font-size="12">',
        f'<text x="8" y="20" font-weight="bold">{escape(heading(estimate))}</text>',
    ]
    for i, (label, part, color, note) in enumerate(rows):
        y = 40 + 20 * i
        if not color:
            out.append(f'<text x="8" y="{y + 12}" font-weight="bold">{escape(label)}</text>')
            continue
        width = max(1.0, 480 * part)
        out.append(f'<text x="208" y="{y + 12}" text-anchor="end">{escape(label)}</text>')
        out.append(f'<rect x="216" y="{y + 2}" width="{width:.1f}" height="14" fill="{color}"/>')
        out.append(f'<text x="{222 + width:.1f}" y="{y + 13}">{escape(note)}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"
