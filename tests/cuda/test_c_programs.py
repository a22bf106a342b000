"""Programs that libmetalcore runs with a driver and an NVRTC that only take notes: what it compiles and launches."""

import json
import sys
from pathlib import Path

import pytest
import torch

import metalcore
from metalcore._core import generated_kernels
from metalcore.msl.language.cuda_source import cuda_source
from metalcore.programs.files import container

sys.path.append(str(Path(__file__).resolve().parents[1] / "c_api"))
from saved_programs import PATTERNS, Mlp, Pooled, compiled

pytestmark = pytest.mark.only_on("simulator")  # whose recordings become cuda's here

RUN = """
import json
context(stream=0x77)
program = ctypes.c_void_p()
assert status("program_load", {path!r}.encode(), None, 0, ctypes.byref(program)) == ("METALCORE_OK", "")
constants = driver.fake_allocated()
def array(*addresses): return (ctypes.c_void_p * len(addresses))(*addresses)
for x, y in ((1, 2), (1, 2), (1, 2), (3, 4)):
    before = driver.fake_allocations()
    found = call("program_run", program, array(x << 32), array(y << 32))
assert driver.fake_allocations() == before and driver.fake_waits() == 0
for launch in found:
    values = {{name: value.hex() if isinstance(value, bytes) else value for name, value in launch.values.items()}}
    source, options = nvrtc.fake_program(int(launch.kernel)).decode(), nvrtc.fake_options(int(launch.kernel)).decode()
    print(json.dumps({{**vars(launch), "values": values, "source": source, "options": options}}))
assert status("program_free", program) == ("METALCORE_OK", "")
assert driver.fake_allocated() == 1  # the context's scratch memory
"""


def for_cuda(path, source):
    """A file whose recording is one for cuda, which the same kernels run."""
    with container.Container(source) as file:
        tensors = {name: file.read(name) for name in file.entries}
        metadata = {name: text for name, text in file.metadata.items() if name != "digest"}
    recording = json.loads(metadata["recordings"])["mps"]
    for name, described in recording["generated"].items():
        described["cuda"] = generated_kernels.translated(name)
    container.write(path, tensors, {**metadata, "recordings": json.dumps({"cuda": recording})})
    return recording


def test_launches_are_those_of_the_recording(run_c, device, tmp_path):
    for kind in (Mlp, Pooled):
        made, _ = compiled(kind, device, torch.float32, [*PATTERNS, "single"])
        made.save(tmp_path / "mps.mcore", recordings=True)
        recording = for_cuda(tmp_path / "cuda.mcore", tmp_path / "mps.mcore")
        launches = [json.loads(line) for line in run_c(RUN.format(path=str(tmp_path / "cuda.mcore"))).splitlines()]
        places = {}
        for launch, dispatch in zip(launches, recording["dispatches"], strict=True):
            group = dispatch["threadgroup"]
            threads = dispatch.get("threads") or [a * b for a, b in zip(dispatch["threadgroups"], group)]
            assert (launch["threads_per_grid"], launch["threads_per_threadgroup"]) == (threads, group)
            assert launch["stream"] == 0x77
            for index, sort, *bound in dispatch["arguments"]:
                if sort == "buffer" and bound:
                    what, number, first, _ = bound
                    begin = launch["values"][f"b{index}"] - first
                    assert places.setdefault((what, number), begin) == begin
                elif sort == "bytes":
                    assert launch["values"][f"i{index}"].startswith(bound[0])
            name = dispatch["kernel"]
            is_generated = name in recording["generated"]
            assert ("--fmad=false" in launch["options"], "-DMSL_CONVERGENT=1" in launch["options"]) == (
                is_generated,
                not is_generated,
            )
            if is_generated:
                described = recording["generated"][name]["cuda"]
                kernels = {name: described["kernel"]}
                expected = cuda_source(described["program"], kernels, [(name, launch["signature"])])[0]
                assert launch["source"] == expected
        assert places["input", 0] == 3 << 32 and places["output", 0] == 4 << 32
        assert len(set(places.values())) == len(places)


def test_a_recording_for_another_device_is_refused(run_c, device, tmp_path):
    made, _ = compiled(Mlp, device)
    made.save(tmp_path / "mps.mcore", recordings=True)
    run_c(f"""
context()
program = ctypes.c_void_p(1)
said, error = status("program_load", {str(tmp_path / "mps.mcore")!r}.encode(), None, 0, ctypes.byref(program))
assert said == "METALCORE_INVALID_FILE" and error.endswith("it has no recording for cuda; it has those for mps"), error
assert not program
""")
    assert metalcore.load(tmp_path / "mps.mcore")
