"""Python programs in processes of their own that are forked from one with PyTorch in it, whose import takes longer than
most of these programs.

    done = python("-c", "import sys, torch; print(sys.argv[1])", "hello")

Programs that are about how a process starts, with another PYTHONPATH for PyTorch or other libraries preloaded, need
subprocess.run() in its place, and so do those whose OMP_NUM_THREADS is not this process's.
"""

import functools
import gc
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import types
from pathlib import Path


def python(*command, env=None, cwd=None, timeout=600):
    """Returns what subprocess.run([sys.executable, *command], capture_output=True, text=True, …) does. The command is
    "-c" and a program, "-m" and a module or a script's path, and arguments."""
    command = [*map(str, command)]
    if sys.platform == "darwin":  # whose Objective-C does not survive a fork
        command = [sys.executable, *command]
        return subprocess.run(command, env=env, cwd=cwd, timeout=timeout, capture_output=True, text=True)
    with tempfile.TemporaryDirectory() as output:
        server = _server()
        request = {"command": command, "environment": dict(env or os.environ), "cwd": str(cwd or Path.cwd())}
        server.stdin.write(json.dumps(request | {"output": output}) + "\n")
        server.stdin.flush()
        process = int(server.stdout.readline())
        late = not select.select([server.stdout], [], [], timeout)[0]
        if late:
            os.kill(process, signal.SIGKILL)
        status = int(server.stdout.readline())
        said = [Path(output, name).read_text() for name in ("out", "err")]
    if late:
        raise subprocess.TimeoutExpired(command, timeout, *said)
    return subprocess.CompletedProcess(command, status, *said)


@functools.cache
def _server():
    """The process that forks the others. It ends with this one, which closes its input."""
    # What METALCORE_SIMULATOR has PyTorch's import load is not for all programs.
    environment = {**os.environ, "METALCORE_SIMULATOR": "0"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, __file__], **pipes, text=True, bufsize=1, env=environment)


def _serve():
    """Returns a request, in the process that is to run it; None in this one, at the end."""
    import torch  # noqa: F401

    gc.freeze()  # each of the processes would walk over PyTorch's objects
    for line in sys.stdin:
        process = os.fork()
        if not process:
            return json.loads(line)
        print(process, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
    return None


def _run(command, environment, cwd, output):
    for descriptor, name in enumerate((os.devnull, "out", "err")):
        file = os.open(os.path.join(output, name), os.O_RDWR | os.O_CREAT)
        os.dup2(file, descriptor)
        os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    kind, *sys.argv = command if command[0] in ("-c", "-m") else ("", *command)
    first = {"-c": "", "-m": cwd, "": os.path.dirname(os.path.abspath(sys.argv[0]))}[kind]
    sys.path[:1] = [first, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    if kind == "-c":
        program, sys.argv[0] = sys.argv[0], "-c"
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), vars(sys.modules["__main__"]))
    elif kind == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__" and (request := _serve()):
    _run(**request)
