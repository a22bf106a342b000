"""python -m metalcore selftest: whether every op is right on this machine's GPU; a report to paste into an issue.

Results and gradients are compared with PyTorch's own ops in float64 on the CPU, on the same rounded input. An error is
measured against the largest value of the tensor that it is in, and may be

    roundings * eps(dtype) + 8 * sqrt(terms) * eps(float32)

since the kernels compute in float32, in sums of `terms` whose roundings go up as often as down, and round to the dtype
of the result. A gradient may be off by four times as much: it is made of rounded results, and of two such computations.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time

from . import devices


def add_parser(commands):
    parser = commands.add_parser(
        "selftest",
        help="check every op on this machine's GPU",
        description="Checks every op, forward and backward, against float64 on the CPU, and "
        "prints a report. Exits with 1 if anything is wrong.",
    )
    devices.add_option(parser)
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=run)


def run(arguments):
    say = (lambda text: None) if arguments.json else (lambda text: print(text, flush=True))
    kind = arguments.device or devices.default()
    device = devices.use(kind)
    machine = _machine(kind)
    for name, value in machine.items():
        say(f"{name:<10} {value}")
    say("")
    checks, planned = [], list(_checks(kind, device))
    for number, (name, action) in enumerate(planned, 1):
        checks.append({"name": name, **_outcome(action, kind)})
        say(f"[{number:{len(str(len(planned)))}}/{len(planned)}] {_line(checks[-1])}")
    failed = [check["name"] for check in checks if check["status"] == "FAILED"]
    skipped = sum(check["status"] == "skipped" for check in checks)
    summary = f"{len(checks) - len(failed) - skipped} of {len(checks)} checks passed"
    summary += f", {skipped} skipped" * bool(skipped) + f", {len(failed)} FAILED: {'; '.join(failed)}" * bool(failed)
    say("\n" + summary)
    if arguments.json:
        print(json.dumps({"machine": machine, "checks": checks, "summary": summary}, indent=2))
    return 1 if failed else 0


def _machine(kind):
    from .info import collect

    found = collect()
    versions = found["versions"]
    backend = {"mps": "metal", "cuda": "cuda", "simulator": "simulator"}[kind]
    return {
        "metalcore": versions["metalcore"],
        "torch": versions["torch"],
        "python": versions["python"],
        "platform": versions["platform"],
        "device": f"{kind}: {_device_name(kind)}",
        "backend": f"{backend}: {found['backends'][backend]}",
    }


def _device_name(kind):
    import torch

    if kind == "cuda":
        return torch.cuda.get_device_name()
    if kind == "mps":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or platform.machine()
    return platform.processor() or platform.machine()


def _checks(kind, device):
    """(name, what to do) of every check; that returns {"note": …} with figures, or raises."""
    from . import selftest_cases

    yield "tensors go to the kernels", lambda: _check_routing(device)
    if kind == "mps":
        yield "every kernel compiles", _check_kernels
    yield "compile_shader", lambda: _check_shader(device)
    yield "compile_shader refuses a faulty program", _check_faulty_shader
    for name, case in selftest_cases.CASES.items():
        for dtype in selftest_cases.DTYPES:
            yield (
                f"{name}, {str(dtype).removeprefix('torch.')}",
                lambda case=case, dtype=dtype: _check_case(case, device, dtype),
            )


def _outcome(action, kind):
    from metalcore.msl.errors import CompilerNotFoundError

    try:
        return {"status": "ok", **action()}
    except Exception as error:  # whatever goes wrong is what the report is for
        if kind == "simulator" and isinstance(error, CompilerNotFoundError):  # compile_shader alone needs one
            return {"status": "skipped", "note": str(error)}
        return {"status": "FAILED", "note": f"{type(error).__name__}: {error}"}


def _line(check):
    return f"{check['status']:<8} {check['name']:<39}  {check['note']}".rstrip()


def _check_routing(device):
    import torch

    from metalcore._routing import accelerated

    if not accelerated(torch.ones(2, device=device)):
        raise RuntimeError(f"this build of metalcore has no backend for {device} tensors: PyTorch's own ops take them")
    return {"note": ""}


def _check_kernels():
    """Compiles each built-in kernel, so that a program Metal refuses is named even if no case below runs it."""
    from metalcore import _C

    names, errors = _C.mps_kernels(), []
    for name in names:
        try:
            _C.mps_compile(name)
        except RuntimeError as error:
            errors.append(f"{name}: {error}")
    if errors:
        raise RuntimeError(f"{len(errors)} of {len(names)} built-in kernels do not compile\n" + "\n".join(errors))
    return {"note": f"{len(names)} kernels"}


def _check_shader(device):
    import torch

    import metalcore

    from .selftest_cases import SHADER

    library = metalcore.compile_shader(SHADER)
    x = torch.arange(1024, dtype=torch.float32, device=device)
    found = torch.empty(4, device=device)
    library.sum256(x, found, 2.0, threads=1024, group_size=256)
    expected = [65280.0, 196352.0, 327424.0, 458496.0]  # whole numbers below 2^24: exact in float32
    if found.tolist() != expected:
        raise ArithmeticError(f"sums are {found.tolist()}, not {expected}")
    return {"note": ""}


def _check_faulty_shader():
    import metalcore
    from metalcore.msl.errors import CompilerNotFoundError

    try:
        library = metalcore.compile_shader("kernel void f(device float* x) { x[0] = no_such_name; }")
        library.f  # where programs are compiled on first use
    except CompilerNotFoundError:
        raise
    except (RuntimeError, SyntaxError) as error:
        if "no_such_name" not in str(error):
            raise RuntimeError(f"the message does not say what is wrong: {error}") from error
        return {"note": ""}
    raise RuntimeError("it was compiled")


def _check_case(case, device, dtype):
    import torch

    inputs = [case.make(_random(shape, seed)).to(dtype) for seed, shape in enumerate(case.shapes)]
    ours, found = _evaluate(case, case.ours, [tensor.to(device) for tensor in inputs], dtype)
    _, expected = _evaluate(case, case.theirs, [tensor.double() for tensor in inputs], dtype)
    shares = {
        part: max(_share(case, a, e, 4 if part == "gradient" else 1) for a, e in zip(found[part], expected[part]))
        for part in found
    }
    wrong = [f"{part} {share:.3g}" for part, share in shares.items() if not share <= 1]
    if wrong:
        raise ArithmeticError(f"error of {', '.join(wrong)} times the bound")
    with torch.no_grad():
        microseconds = _time(lambda: case.ours(*ours), device)
    note = ", ".join(f"{part} {share:.2f}" for part, share in shares.items())
    return {
        "note": f"{note} of the bound; {microseconds:.0f} µs",
        "share of the bound": shares,
        "forward in microseconds": round(microseconds, 1),
    }


def _evaluate(case, function, inputs, dtype):
    """The inputs as leaves, and {"forward": results, "gradient": those of a random linear function of the results}."""
    import torch

    leaves = [tensor.requires_grad_(case.backward) for tensor in inputs]
    results = function(*leaves)
    results = [results] if isinstance(results, torch.Tensor) else list(results)
    values = {"forward": [result.detach() for result in results]}
    if case.backward:
        directions = [_random(result.shape, 100 + i).to(dtype).to(result) for i, result in enumerate(results)]
        values["gradient"] = torch.autograd.grad(results, leaves, directions)
    return leaves, values


def _random(shape, seed):
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _share(case, actual, expected, factor):
    """The error as a share of what it may be; infinite where shapes differ or NaN is in only one of them."""
    import torch

    if actual.shape != expected.shape:
        return float("inf")
    if not actual.numel():
        return 0.0
    rounding, arithmetic = torch.finfo(actual.dtype).eps, torch.finfo(torch.float32).eps
    bound = factor * (case.roundings * rounding + 8 * case.terms**0.5 * arithmetic)
    error = (actual.cpu().double() - expected).abs().max() / expected.abs().max()
    return float("inf") if error.isnan() else (error / bound).item()


def _time(call, device):
    """The least time of a call in microseconds, the GPU's work included, out of a few rounds of some calls."""
    import torch

    synchronize = getattr(torch, device).synchronize
    calls, rounds = (10, 5) if "metalcore.simulator" not in sys.modules else (1, 2)
    times = []
    for _ in range(rounds):
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return min(times)
