"""python -m metalcore ops: every op, and what it is to PyTorch, as the Markdown of docs/ops.md."""

from __future__ import annotations

import inspect

from metalcore._core.registry import OPS, FunctionOverride, OptimizerOverride
from metalcore.mac_kernels import RELEASES
from metalcore.overrides._gains import why_off
from metalcore.overrides.libraries import NAMES as MODULES

HEAD = """\
# Ops

Every op of metalcore, by the module that has it. `python -m metalcore ops` prints this page.

- **as** has the namesake in PyTorch, whose arguments, results and errors the op has.
- **override**: what `enable_pytorch_overrides(name)` makes PyTorch use instead of its own.
- **default on a Mac**: what `enable_pytorch_overrides()` without names replaces there, where nobody has measured any
  override: that for which PyTorch has no Metal kernel of its own, by PyTorch's release
  ([why](api.md#what-is-on-by-default)). On NVIDIA GPUs and on the simulated device all of them are on.
- **derivative**: whether it can be differentiated, with metalcore's kernels or PyTorch's ops.
- **16 bits**: whether it takes float16 and bfloat16 besides float32.
"""
COLUMNS = ("op", "", "as", "override", "default on a Mac", "derivative", "16 bits")


def add_parser(commands):
    parser = commands.add_parser(
        "ops",
        help="every op, its namesake in PyTorch, what its override replaces",
        description="Prints a table of every op as Markdown.",
    )
    parser.add_argument(
        "--programs", action="store_true", help="what generated kernels take instead: PyTorch's operators, by overload"
    )
    parser.set_defaults(run=run)


def run(arguments):
    print(programs_page() if arguments.programs else page(), end="")


def programs_page():
    from metalcore.programs.pointwise import tables

    return "\n".join(["# Operators that generated kernels take", "", *tables(), ""])


def page():
    modules = {}
    for op in OPS.values():
        modules.setdefault(f"metalcore.{op.family}", []).append(op)
    return "\n".join([HEAD, *(line for module, ops in sorted(modules.items()) for line in _table(module, ops))])


def _table(module, ops):
    rows = [COLUMNS, ["---"] * len(COLUMNS), *(_cells(op) for op in sorted(ops, key=lambda op: op.name))]
    return [f"## {module}", "", *(f"| {' | '.join(row)} |" for row in rows), ""]


def _cells(op):
    return (
        f"`{op.function.__name__}`",
        _summary(op.function),
        f"`{op.namesake}`" if op.namesake else "",
        _override(op),
        _on_a_mac(op),
        "yes" if op.backward else "no",
        "yes" if len(op.dtypes) > 1 else "no",
    )


def _summary(function):
    """Returns the first sentence of its docstring."""
    first = (inspect.getdoc(function) or "").split("\n\n")[0]
    return " ".join(first.split()).split(". ")[0].rstrip(".").replace("|", "\\|")


def _override(op):
    override, replaced = op.override, []
    if isinstance(override, OptimizerOverride):
        replaced.append(f"`{override.original.__module__}.{override.original.__qualname__}.step`")
    elif isinstance(override, FunctionOverride):
        replaced += [f"`{place}`" for place in override.functions]
    else:
        replaced += dict.fromkeys(f"`aten::{one.operator}`" for one in override or ())
    if op.name in MODULES:
        replaced.append("libraries' modules")
    return ", ".join(replaced)


def _on_a_mac(op):
    """Returns what of its override is on by default on a Mac, as long as nobody has measured it."""
    if getattr(op.override, "fused", None):
        return "steps that are not `fused`"
    if not isinstance(op.override, tuple):
        return "on" if op.override or op.name in MODULES else ""
    parts = {f"`aten::{one.operator}`{_calls(one)}": _until(op.name, one) for one in op.override}
    if op.name in MODULES and op.name not in ("scaled_dot_product_attention",):
        parts["libraries' modules"] = ""
    if not any(parts.values()) and not any("calls" in what for what in parts):
        return "on"
    return ", ".join(f"{what} {until}".strip() for what, until in parts.items() if until != "off") or "off"


def _calls(one):
    return ": calls that PyTorch has no kernel for" if one.own_calls else ""


def _until(name, one):
    """Returns "" where it is on with each release of PyTorch, "off" where with none, "before 2.12"."""
    on = [release for release in RELEASES if why_off(name, one, "mps", release, {}) is None]
    if len(on) == len(RELEASES):
        return ""
    if not on:
        return "off"
    major, minor = on[-1]
    return f"before {major}.{minor + 1}"
