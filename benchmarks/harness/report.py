"""Shows a run: as text, Markdown and HTML, from the data that its JSON file holds."""

from __future__ import annotations

import base64
import html
import json
from itertools import groupby
from pathlib import Path

from . import maps, plots
from .case import TARGETS


def against(data):
    """Returns the other side of a run's comparisons."""
    return data["settings"].get("against", "PyTorch")


def columns(data):
    return (
        *("case", "shape", "dtype", "metalcore", against(data)),
        *("speedup (quartiles)", "achieved", "of limit", "target"),
    )


class Files:
    """The files of a run: <folder>/<stem>.json, .md, .html and <stem>-<family>.png."""

    def __init__(self, folder, stem):
        self.folder, self.stem = Path(folder), stem

    def write_json(self, data):
        """Writes one result per line, and five digits of each figure."""

        def figure(text):
            return float(f"{float(text):.5g}")

        data = json.loads(json.dumps(data), parse_float=figure)
        head = json.dumps({name: value for name, value in data.items() if name != "results"}, indent=1)
        results = ",\n".join(json.dumps(result, separators=(",", ":")) for result in data["results"])
        self._write("json", head.removesuffix("\n}") + f',\n "results": [\n{results}\n]\n}}\n')

    def write_reports(self, data):
        """Writes Markdown, plots where matplotlib is installed, and HTML; returns the paths of all files there are."""
        pictures = {}
        for name, results in by_family(data):
            path = self.folder / f"{self.stem}-{name}.png"
            if plots.draw(name, results, data["machine"], path, against(data)):
                pictures[name] = path
        self._write("md", markdown(data, pictures))
        self._write("html", page(data, pictures))
        return [*(self._path(kind) for kind in ("json", "md", "html")), *pictures.values()]

    def _path(self, kind):
        return self.folder / f"{self.stem}.{kind}"

    def _write(self, kind, content):
        self.folder.mkdir(parents=True, exist_ok=True)
        self._path(kind).write_text(content, encoding="utf-8")


def load(path):
    """Returns the data of a JSON file.

    Raises:
        ValueError: there is none, or it was not written by a run.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--report {path}: {error}") from None
    if not isinstance(data, dict) or not {"machine", "ceilings", "settings", "results"} <= set(data):
        raise ValueError(f"--report {path}: not the JSON file of a benchmark")
    return data


def merge(runs):
    """Joins several runs of one machine and commit to one. Where a case occurs twice, the later result counts.

    Raises:
        ValueError: they are not of one machine, metalcore and PyTorch.
    """
    for name in ("device_name", "torch", "commit", "threads", "driver"):
        values = {run["machine"].get(name) for run in runs}
        if len(values) > 1:
            raise ValueError(f"--report: the runs differ in {name}: {', '.join(sorted(map(str, values)))}")
    results = {
        tuple(result[key] for key in ("family", "name", "shape", "dtype")): result
        for run in runs
        for result in run["results"]
    }
    return {**runs[-1], "results": sorted(results.values(), key=lambda result: result["family"])}


def by_family(data):
    return [(name, list(results)) for name, results in groupby(data["results"], key=lambda result: result["family"])]


# Words


def number_text(value):
    """Returns a number with three digits, and all before the point."""
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def seconds_text(seconds):
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "us")):
        if abs(seconds) * factor >= 0.9995 or unit == "us":
            return f"{number_text(seconds * factor)} {unit}"


def rate_text(rate, unit):
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if rate >= 0.9995 * factor or prefix == "M":
            return f"{number_text(rate / factor)} {prefix}{unit}"


def target_text(target):
    def value(x):
        if x is None:
            return "none"
        if target["quantity"] in ("seconds", "excess", "overhead"):
            return seconds_text(x)
        return f"{x:.1%}" if target["quantity"] == "share" else number_text(x)

    return f"{target['quantity']} {TARGETS[target['quantity']]} {value(target['bound'])}"


def verdict(result):
    """Returns whether the targets are met, with those that are not."""
    targets = result.get("targets")
    if not targets:
        return ""
    missed = [target_text(target) for target in targets if not target["met"]]
    return "MISS " + ", ".join(missed) if missed else "pass"


def cells(result):
    """Returns the texts of a result, in the order of columns()."""
    identity = [
        result["name"] + (f" [{result['variant']}]" if result.get("variant") else ""),
        result["shape"],
        result["dtype"],
    ]
    if "error" in result:
        return [*identity, "error", "", "", "", "", result["error"].splitlines()[0]]
    ratio = result.get("speedup")
    achieved = (
        f"{seconds_text(result['overhead'])} beyond a launch"
        if "overhead" in result
        else rate_text(result["flops_per_second"], "FLOP/s")
        if result.get("flops_per_second")
        else rate_text(result["bytes_per_second"], "B/s")
        if result.get("bytes_per_second")
        else ""
    )
    return [
        *identity,
        seconds_text(result["ours"]["median"]),
        seconds_text(result["theirs"]["median"]) if "theirs" in result else "",
        "{median} ({q1} to {q3})".format(**{name: number_text(ratio[name]) for name in ratio}) if ratio else "",
        achieved + (" (cache)" if result["cached"] and achieved else ""),
        f"{result['share']:.1%}" if "share" in result else "",
        verdict(result),
    ]


def methods(results):
    """Returns the clocks that measured the results, in words."""
    names = sorted({result["method"] for result in results if "error" not in result})
    return "measured by " + ", ".join(names) if names else ""


def brief(result):
    """Returns one line of progress."""
    if "error" in result:
        return result["error"].splitlines()[0]
    names = ("", "", "", "", "against ", "speedup ", "", "of limit ", "")
    return ", ".join(name + cell for name, cell in list(zip(names, cells(result)))[3:] if cell)


def facts(data):
    """Returns what was measured where, as (name, text)."""
    rows = [(name.replace("_", " "), str(value)) for name, value in data["machine"].items() if name != "cache_bytes"]
    ceilings = data["ceilings"]
    rows += [
        ("copy bandwidth", rate_text(ceilings["copy"], "B/s")),
        ("matmul float32", rate_text(ceilings["matmul_float32"], "FLOP/s")),
        ("matmul bfloat16", rate_text(ceilings["matmul_bfloat16"], "FLOP/s")),
        ("rounds", str(data["settings"]["rounds"])),
    ]
    return rows + [("settings", name) for name in ("quick", "eager") if data["settings"][name]]


def totals(data):
    """Returns how many targets were met, and how many cases raised; empty where there is nothing to say."""
    targets = [target for result in data["results"] for target in result.get("targets", ())]
    errors = sum("error" in result for result in data["results"])
    sentences = [f"{sum(target['met'] for target in targets)} of {len(targets)} targets met"] if targets else []
    return ", ".join(sentences + ([f"{errors} cases failed"] if errors else []))


# Formats


def text(data):
    """Returns the tables for a terminal."""
    lines = [f"{name}: {value}" for name, value in facts(data)]
    for name, results in by_family(data):
        lines += ["", ", ".join(filter(None, [name, methods(results)]))]
        if maps.is_map(results):
            lines += maps.text(results)
            results = maps.misses(results)
        rows = [list(columns(data)), *map(cells, results)]
        used = [index for index in range(len(rows[0])) if any(row[index] for row in rows[1:])]
        widths = {index: max(len(row[index]) for row in rows) for index in used}
        lines += ["  ".join(row[index].ljust(widths[index]) for index in used).rstrip() for row in rows if used]
    return "\n".join([*lines, *(["", totals(data)] if totals(data) else [])])


def markdown(data, pictures):
    machine = data["machine"]
    lines = [f"# {machine['device_name']}, {machine['date'][:10]}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {_escaped(value)} |" for name, value in facts(data)]
    if totals(data):
        lines += ["", totals(data)]
    for name, results in by_family(data):
        lines += ["", f"## {name}", "", methods(results), ""]
        if name in pictures:
            lines += [f"![{name}]({pictures[name].name})", ""]
        if maps.is_map(results):
            lines += [*maps.markdown(results), ""]
            results = maps.misses(results)
            if not results:
                continue
        head = columns(data)
        lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        lines += ["| " + " | ".join(map(_escaped, cells(result))) + " |" for result in results]
    return "\n".join(lines) + "\n"


def _escaped(cell):
    return cell.replace("|", "\\|")


STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 82em; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 } td, th { padding: .15em .7em; text-align: left; white-space: nowrap }
tr { border-bottom: 1px solid #ddd } .pass { color: #1a7f37 } .miss { color: #c0261c; font-weight: 600 }
img { max-width: 100% } nav a { margin-right: 1em }
"""


def page(data, pictures):
    """Returns one HTML page that needs no other file."""
    machine = data["machine"]
    name = html.escape(f"metalcore: {machine['device_name']}, {machine['date'][:10]}")
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{name}</title>',
        f"<style>{STYLE}</style></head><body><h1>{name}</h1>",
    ]
    parts += [_table([], facts(data)), f"<p>{html.escape(totals(data))}</p>", "<nav>"]
    parts += [f'<a href="#{family}">{family}</a>' for family, _ in by_family(data)]
    parts.append("</nav>")
    for family, results in by_family(data):
        parts.append(f'<h2 id="{family}">{family}</h2>')
        if family in pictures:
            picture = base64.b64encode(pictures[family].read_bytes()).decode()
            parts.append(f'<img alt="{family}" src="data:image/png;base64,{picture}">')
        parts.append(f"<p>{html.escape(methods(results))}</p>")
        if maps.is_map(results):
            parts += maps.page(results)
            results = maps.misses(results)
        if results:
            parts.append(_table(columns(data), map(cells, results)))
    return "\n".join([*parts, "</body></html>", ""])


def _table(head, rows):
    lines = ["<table>"]
    if head:
        lines.append("<tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in head) + "</tr>")
    lines += ["<tr>" + "".join(f"<td{_class(cell)}>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    return "\n".join([*lines, "</table>"])


def _class(cell):
    if cell == "pass":
        return ' class="pass"'
    return ' class="miss"' if cell.startswith("MISS") or cell == "error" else ""
