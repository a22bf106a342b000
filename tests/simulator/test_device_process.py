"""The import of metalcore.simulator in a process: when it refuses, and how programs start and end."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import processes
import pytest

ROOT = Path(__file__).resolve().parents[2]


def python(*arguments, **environment):
    """Runs the interpreter, which must exit with 0, and returns its output."""
    result = interpret(*arguments, **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


def interpret(*arguments, **environment):
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, *arguments],
        text=True,
        capture_output=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )


def with_torch(program, **environment):
    """Runs a program in a process that has imported PyTorch, and has not asked it anything."""
    result = processes.python("-c", program, env={**os.environ, **environment}, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_is_idempotent():
    assert (
        python(
            "-c",
            """
import importlib, sys, torch, metalcore.simulator
x = torch.ones(2, device="mps")
importlib.reload(metalcore.simulator)
for name in [name for name in sys.modules if name.startswith("metalcore.simulator")]:
    del sys.modules[name]
import metalcore.simulator
print((x + torch.ones(2, device="mps")).tolist())
""",
        )
        == "[2.0, 2.0]\n"
    )


def test_import_after_pytorch_was_asked_about_mps():
    assert (
        python(
            "-c",
            """
import torch
print(torch.backends.mps.is_available(), torch.accelerator.is_available())
torch.manual_seed(0)
import metalcore.simulator
print(torch.backends.mps.is_available(), torch.accelerator.current_accelerator())
x = torch.ones(2, device="mps", requires_grad=True)
(x * 3).sum().backward()
print(x.grad.tolist())
""",
        )
        == "False False\nTrue mps\n[3.0, 3.0]\n"
    )


REFUSALS = {
    "backward": ("w = torch.ones(2, requires_grad=True); w.sum().backward()", "before the first backward"),
    "real MPS": ("torch._C._has_mps = True", "real MPS backend"),
    "old torch": ("torch.__version__ = torch.torch_version.TorchVersion('2.9.1')", "needs torch 2.10 or newer"),
    "CUDA": (
        "torch._C._get_accelerator = lambda: torch.device('cuda'); torch.cuda.is_available = lambda: True",
        "METALCORE_HIDE_CUDA=1",
    ),
    "XPU": ("torch._C._get_accelerator = lambda: torch.device('xpu')", "'xpu'"),
    "platform": ("import sys; sys.platform = 'win32'", "runs on Linux"),
}


@pytest.mark.parametrize("before, reason", REFUSALS.values(), ids=REFUSALS)
def test_refusals_leave_the_process_unharmed(before, reason):
    output = with_torch(
        f"""
import torch, metalcore
{before}
try:
    import metalcore.simulator
except RuntimeError as error:
    print(error)
x = torch.ones(2, requires_grad=True)
(x * 3).sum().backward()
try:
    torch.ones(2, device="mps")
except RuntimeError as error:
    print("no mps", x.grad.tolist())
""",
    )
    assert reason in output and output.endswith("no mps [3.0, 3.0]\n")


def test_hidden_cuda():
    assert (
        with_torch(
            """
import os, torch
torch._C._get_accelerator = lambda: torch.device("cuda")
torch.cuda.is_available = lambda: os.environ.get("CUDA_VISIBLE_DEVICES") != ""
import metalcore.simulator
print(torch.ones(2, device="mps").tolist())
""",
            METALCORE_HIDE_CUDA="1",
        )
        == "[1.0, 1.0]\n"
    )


ENDINGS = {
    "backward": "",
    "again": "",  # the abort that this test looks for came every other time
    "thread": """
import threading
thread = threading.Thread(target=lambda: work()); thread.start()
""",
    "fork": """
import os
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
""",
}


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
def test_a_program_may_end_right_after_backward(ending):
    # Its last graph holds Python objects, which autograd's thread drops only after backward() has returned.
    python(
        "-c",
        f"""
import torch, metalcore.simulator

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.object = object()
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2

def work():
    weight = torch.ones(64, 64, device="mps", requires_grad=True)
    loss = Double.apply(weight @ weight).sum()
    loss.register_hook(lambda gradient: gradient)
    loss.backward()

work()
{ending}
""",
    )


def test_forked_children_may_use_the_device():
    assert (
        python(
            "-c",
            """
import os, torch, metalcore.simulator
x = torch.ones(2, device="mps")
child = os.fork()
if not child:
    y = torch.ones(2, device="mps", requires_grad=True)
    (x * y).sum().backward()
    assert y.grad.tolist() == [1, 1]
else:
    print(os.waitpid(child, 0)[1])
""",
        )
        == "0\n"
    )


def test_running_a_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import pickle, sys, torch, helper
class Thing: pass
pickle.dumps(Thing())
print(__name__, sys.argv[1:], torch.ones(2, device="mps").device, helper.name)
if __name__ == "__main__":
    sys.exit(3)
""")
    (tmp_path / "helper.py").write_text("name = 'helper'")
    result = interpret("-m", "metalcore.simulator", str(script), "a", "-b")
    assert result.stdout == "__main__ ['a', '-b'] mps:0 helper\n" and result.returncode == 3


def test_running_a_module(tmp_path):
    program = "import sys, torch\nprint(__name__, sys.argv[1:], torch.ones(1, device='mps').device)"
    (tmp_path / "program.py").write_text(program)
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    output = python("-m", "metalcore.simulator", "-m", "program", "x", PYTHONPATH=path)
    assert output == "__main__ ['x'] mps:0\n"


def test_running_code():
    program = "import sys, torch; print(sys.argv, torch.ones(1, device='mps').device)"
    output = python("-m", "metalcore.simulator", "-c", program, "x")
    assert output == "['-c', 'x'] mps:0\n"


CHILDREN = """
import multiprocessing, os, subprocess, sys

USE = "import torch; print(torch.ones(1, device='mps').device, flush=True)"

def use():
    exec(USE)

def child(code, **environment):
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment})

if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        process = multiprocessing.get_context(method).Process(target=use)
        process.start()
        process.join()
    child(USE)
    child(USE.replace("torch;", "metalcore, torch;"))  # where loading the device begins inside of metalcore's import
    child("import sys; print(sys.modules.keys() & {'metalcore', 'torch'}, flush=True)")
    child("import torch; print(torch.backends.mps.is_available(), flush=True)", METALCORE_SIMULATOR="0")
"""


def test_children_have_the_device(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(CHILDREN)
    assert python("-m", "metalcore.simulator", str(script)).splitlines() == ["mps:0"] * 4 + ["set()", "False"]


@pytest.mark.parametrize(
    "launcher",
    [["torch.distributed.run", "--nproc-per-node=2"], ["accelerate.commands.launch", "--num_processes=1"]],
    ids=lambda found: found[0],
)
def test_launched_programs_have_the_device(tmp_path, launcher):
    script = tmp_path / "script.py"
    script.write_text("import torch; print(f'{torch.ones(1, device=\"mps\").device}\\n', end='', flush=True)")
    output = python("-m", "metalcore.simulator", "-m", *launcher, str(script))
    assert output == "mps:0\n" * (2 if launcher[0].startswith("torch") else 1)


def test_the_environment_variable():
    """An installed metalcore has its entry point, so only the variable has to be set."""
    from metalcore.simulator import device

    path = os.pathsep.join([str(ROOT), str(device.AUTOLOAD)])
    program = "import torch; print(torch.backends.mps.is_available())"
    for setting, expected in (("on", True), ("False", False)):  # tests/cli/test_tune.py has more
        assert python("-c", program, PYTHONPATH=path, METALCORE_SIMULATOR=setting) == f"{expected}\n"
    off = {"METALCORE_SIMULATOR": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert python("-c", program, PYTHONPATH=path, **off) == "False\n"


def test_the_entry_point_of_a_checkout_is_that_of_the_wheel():
    from metalcore.simulator import device

    (declared,) = device.AUTOLOAD.glob("*.dist-info/entry_points.txt")
    assert declared.read_text() == "[torch.backends]\nmetalcore = metalcore_autoload:load\n"
    in_wheel = '[project.entry-points."torch.backends"]\nmetalcore = "metalcore_autoload:load"\n'
    assert in_wheel in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("arguments", [["-m"], ["--unknown"]], ids=str)
def test_usage(arguments):
    result = interpret("-m", "metalcore.simulator", *arguments)
    assert result.returncode == 2 and "script.py" in result.stderr


def test_a_wheel_has_the_same_extension(tmp_path):
    # The extension's name is made from the sources, and a wheel has these in another place than a checkout.
    from metalcore import _device_library

    package = tmp_path / "metalcore"
    (package / "simulator" / "csrc").mkdir(parents=True)
    include = package / "msl" / "include"
    (include / "host").mkdir(parents=True)
    shutil.copy(_device_library.__file__, package)
    for path in _device_library.sources():
        inside = path.is_relative_to(_device_library.INCLUDE)
        shutil.copy(
            path, include / path.relative_to(_device_library.INCLUDE) if inside else package / "simulator" / "csrc"
        )
    specification = importlib.util.spec_from_file_location("in_wheel", package / "_device_library.py")
    in_wheel = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(in_wheel)
    assert in_wheel.library_name() == _device_library.library_name()


def test_another_pytorch_needs_a_compiler(tmp_path):
    # This is the state where the device was not compiled for this PyTorch before.
    result = interpret(
        "-c",
        """
from metalcore import _device_library
_device_library.library_name = lambda: "_device-another.so"
import metalcore.simulator
""",
        PATH=str(tmp_path),
        CXX="",
        METALCORE_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert result.returncode == 1 and "needs a C++ compiler" in result.stderr.replace("\n", " ")
    assert "has to be compiled, once" in result.stderr
