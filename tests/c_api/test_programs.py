"""Programs of files that libmetalcore runs: the bits of Python's replay, and what it refuses."""

import json
import random

import pytest
import torch
from c_program import HERE, LIBRARY, compiled
from processes import python
from saved_programs import PATTERNS, Block, Mlp, Pair, Pooled, Residual, Runs, read_like, replayed
from saved_programs import compiled as compiled_program

import metalcore
from metalcore.cli import main
from metalcore.programs.files import container, describe

pytestmark = pytest.mark.only_on("simulator")  # they need the kernels for CPUs

KINDS = (Mlp, Residual, Block, Pair)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    if not (LIBRARY / "libmetalcore.so").exists():
        pytest.skip("libmetalcore is built for Linux")
    return compiled(HERE / "programs.c", tmp_path_factory.mktemp("programs") / "programs")


@pytest.fixture(scope="module")
def saved(device, tmp_path_factory):
    """{(module, dtype): (the file, arguments, the results of Python's replay)}."""
    folder, found = tmp_path_factory.mktemp("saved"), {}
    for kind in KINDS:
        for dtype in (torch.float32, torch.bfloat16):
            made, arguments = compiled_program(kind, device, dtype)
            path = folder / f"{kind.__name__}_{dtype}.mcore"
            made.save(path, recordings=True)
            found[kind, dtype] = path, arguments, replayed(made, arguments)
    return found


@pytest.fixture
def runs(tmp_path):
    return Runs(tmp_path)


def add_all(runs, saved):
    return [runs.add(path, arguments, expected) for path, arguments, expected in saved.values()]


def test_the_bits_of_pythons_replay(program, runs, saved):
    made = add_all(runs, saved)
    reports = runs.run(program, "--trusted", "1", "--repeat", "3")
    for (_, _, expected), paths, (status, _, error) in zip(saved.values(), made, reports, strict=True):
        assert status == "METALCORE_OK", error
        for path, like in zip(paths, expected, strict=True):
            assert torch.equal(read_like(path, like).view(torch.uint8), like.view(torch.uint8))


def test_a_file_of_a_stranger_runs_in_checking_mode(program, runs, saved):
    """Kernels add in another order there."""
    made = add_all(runs, saved)
    for (key, (_, _, expected)), paths, (status, _, error) in zip(saved.items(), made, runs.run(program), strict=True):
        assert status == "METALCORE_OK", error
        for path, like in zip(paths, expected, strict=True):
            scale = max(1.0, like.double().abs().max().item())
            # At most 64 roundings of the largest number stand behind each other.
            torch.testing.assert_close(
                read_like(path, like).double(), like.double(), rtol=0, atol=64 * torch.finfo(key[1]).eps * scale
            )


def test_no_allocations(program, runs, saved, counter):
    add_all(runs, saved)
    environment = {"LD_PRELOAD": str(counter)}
    reports = runs.run(program, "--trusted", "1", "--repeat", "4", environment=environment)
    assert [(status, count) for status, count, _ in reports] == [("METALCORE_OK", 0)] * len(saved)


def test_arrays_are_described(program, runs, saved):
    path, arguments, expected = saved[Block, torch.bfloat16]
    runs.add(path, arguments, expected)
    runs.run(program, "--describe", "1")
    assert runs.printed == [
        *("input x 2 1:576 9:64 64:1", "input cosine 2 9:8 8:1", "input sine 2 9:8 8:1"),
        "output result_0 2 1:576 9:64 64:1",
    ]


def test_the_command_line_describes_recordings(saved):
    text = describe(saved[Mlp, torch.float32][0])
    assert "recording for mps: " in text and "4 constants" not in text and "bytes of scratch memory" in text
    manifest = json.loads(describe(saved[Mlp, torch.float32][0], manifest=True))
    assert manifest["recordings"]["mps"]["inputs"] == [{"name": "x", "dtype": "float32", "shape": [5, 48]}]


def test_python_loads_the_same_file(saved):
    path, arguments, expected = saved[Mlp, torch.float32]
    assert torch.equal(metalcore.load(path)(*arguments).cpu(), expected[0])


@pytest.mark.parametrize("kind", KINDS)
def test_weights_apart(kind, device, program, runs, tmp_path):
    """Constants are made of them by the recipe: permuted, cast, folded with batch norms. They may be others, too."""
    made, arguments = compiled_program(kind, device)
    path = tmp_path / "apart.mcore"
    made.save(path, weights="apart", recordings=True)
    with container.Container(tmp_path / "apart.safetensors") as file:
        weights = {name: file.read(name) for name in file.entries}
    others = {name: (tensor * 0.75).half() for name, tensor in weights.items()}
    container.write(tmp_path / "others.safetensors", others, {})
    changed = metalcore.load(path, weights=tmp_path / "others.safetensors", device=device)
    expected = [replayed(made, arguments), replayed(changed, arguments)]
    found = [runs.add(path, arguments, expected[0])]
    found.append(runs.add(path, arguments, expected[1], tmp_path / "others.safetensors"))
    runs.add(path, weights=tmp_path / "none.safetensors")
    *reports, missing = runs.run(program, "--trusted", "1")
    for results, paths, (status, _, error) in zip(expected, found, reports, strict=True):
        assert status == "METALCORE_OK", error
        for file, like in zip(paths, results, strict=True):
            assert torch.equal(read_like(file, like), like)
    assert missing[0] == "METALCORE_INVALID_FILE"


def test_what_has_no_recording_is_refused(device, tmp_path):
    made, _ = compiled_program(Mlp, device, fusions=[])
    with pytest.raises(ValueError, match=r"aten::\w+.*the names of all patterns"):
        made.save(tmp_path / "a.mcore", recordings=True)

    class Inside(torch.nn.Module):
        def forward(self, x):
            return metalcore.softmax(x, -1)[:, :2]

    x = torch.ones(2, 4, device=device)
    with pytest.raises(ValueError, match="result_0 is a part of larger memory"):
        metalcore.compile(Inside(), (x,), fusions=[]).save(tmp_path / "a.mcore", recordings=True)

    class Same(torch.nn.Module):
        def forward(self, x):
            y = metalcore.softmax(x, -1)
            return y, y.view(-1)

    with pytest.raises(ValueError, match="result_1 is memory that it shares"):
        metalcore.compile(Same(), (x,), fusions=[]).save(tmp_path / "a.mcore", recordings=True)
    assert not list(tmp_path.iterdir())


def test_generated_kernels_were_compiled_before(device, program, runs, tmp_path, capsys):
    """libmetalcore compiles nothing for the CPU: it takes what `program prepare` compiled from the program itself."""
    made, arguments = compiled_program(Pooled, device, fusions=None)
    made.save(tmp_path / "plain.mcore")
    made, arguments = compiled_program(Pooled, device, fusions=[*PATTERNS, "single"])
    path, folder = tmp_path / "pooled.mcore", tmp_path / "prepared"
    made.save(path, recordings=True)
    expected = replayed(made, arguments)
    (found,) = runs.add(path, arguments, expected)
    runs.add(tmp_path / "plain.mcore")
    generated, plain = runs.run(program)
    assert generated[0] == "METALCORE_INVALID_FILE" and "METALCORE_GENERATED_DIR must be" in generated[2]
    assert plain[2].endswith("it has no recordings: save the program with recordings=True")
    assert main(["program", "prepare", str(path), "-o", str(folder)]) == 0
    assert "generated kernels in" in capsys.readouterr().out
    environment = {"METALCORE_GENERATED_DIR": str(folder)}
    for trusted in ("0", "1"):
        status, _, error = runs.run(program, "--trusted", trusted, environment=environment)[0]
        assert status == "METALCORE_OK", error
        # Results are below 2. Checking mode adds in another order: 8 roundings.
        tolerance = 0 if trusted == "1" else 16 * torch.finfo(torch.float32).eps
        torch.testing.assert_close(read_like(found, expected[0]), expected[0], rtol=0, atol=tolerance)


def test_damage_is_noticed(program, runs, saved, tmp_path):
    data = saved[Pair, torch.float32][0].read_bytes()
    draw = random.Random(0)
    changed = [data[:size] for size in [*range(0, len(data), 997), len(data) - 1]] + [data + b"\0"]
    for place in [*range(16), *(draw.randrange(len(data)) for _ in range(100)), len(data) - 1]:
        one = bytearray(data)
        one[place] ^= 1 << draw.randrange(8)
        changed.append(bytes(one))
    for number, content in enumerate(changed):
        (tmp_path / f"{number}.mcore").write_bytes(content)
        runs.add(tmp_path / f"{number}.mcore")
    for path in (tmp_path, tmp_path / "none.mcore"):
        runs.add(path)
    assert {status for status, *_ in runs.run(program)} == {"METALCORE_INVALID_FILE"}


def rewritten(path, source, change, change_manifest=None):
    """A file with another recording, or another manifest, and a digest that fits."""
    with container.Container(source) as file:
        tensors = {name: file.read(name) for name in file.entries}
        metadata = {name: text for name, text in file.metadata.items() if name != "digest"}
    recordings = json.loads(metadata["recordings"])
    changed = change(recordings["mps"])
    metadata["recordings"] = json.dumps(recordings if changed is None else {"mps": changed})
    if change_manifest:
        manifest = json.loads(metadata["program"])
        change_manifest(manifest)
        metadata["program"] = json.dumps(manifest)
    container.write(path, tensors, metadata)
    return path


def setting(*places, to):
    def change(recording):
        kernel = recording["dispatches"][0]["kernel"]
        there = recording
        for place in places[:-1]:
            there = there[place]
        there[kernel if places[-1] == "first" else places[-1]] = {kernel: {"msl": ""}} if to == "first" else to

    return change


FIRST = ("dispatches", 0)
HOSTILE = {
    "offset beyond": (setting(*FIRST, "arguments", 0, 4, to=1), "not within its array"),
    "size beyond": (setting(*FIRST, "arguments", 0, 5, to=1 << 40), "not within its array"),
    "overflow": (setting(*FIRST, "arguments", 0, 4, to=(1 << 63) - 1), "must be from 0 to"),
    "negative": (setting(*FIRST, "arguments", 0, 4, to=-4), "must be from 0 to"),
    "no array": (setting(*FIRST, "arguments", 0, 3, to=1), "an array that is not there"),
    "no memory": (setting(*FIRST, "arguments", 0, 2, to="host"), "unknown memory"),
    "no kind": (setting(*FIRST, "arguments", 0, 1, to="code"), "one thing"),
    "an index": (setting(*FIRST, "arguments", 0, 0, to=31), "must be from 0 to 30"),
    "bound twice": (setting(*FIRST, "arguments", 0, 0, to=1), "bound twice"),
    "nothing bound": (setting(*FIRST, "arguments", to=[]), "is not bound"),
    "no bytes": (setting(*FIRST, "arguments", to=[[0, "bytes", "0x"]]), "hexadecimal digits"),
    "many bytes": (setting(*FIRST, "arguments", to=[[0, "bytes", "00" * 5000]]), "4096"),
    "much threadgroup memory": (setting(*FIRST, "arguments", to=[[0, "threadgroup", 1 << 20]]), "must be from 0"),
    "no grid": (setting(*FIRST, "threadgroups", to=[0, 1, 1]), "empty"),
    "a huge grid": (setting(*FIRST, "threadgroups", to=[1 << 31, 1, 1]), "threads"),
    "a huge threadgroup": (setting(*FIRST, "threadgroup", to=[1 << 31, 1 << 31, 1 << 31]), "too many threads"),
    "a large threadgroup": (setting(*FIRST, "threadgroup", to=[64, 64, 1]), "too many threads"),
    "no kernel": (setting(*FIRST, "kernel", to="../evil"), "does not say which kernel"),
    "another kernel": (setting("kernels", to={"evil": "0"}), "this metalcore has no kernel 'evil'"),
    "another digest": (setting("kernels", "first", to="0" * 64), "is another one in this metalcore"),
    "a generated built-in": (setting("generated", to="first"), "has the name of"),
    "a dtype": (setting("inputs", 0, "dtype", to="float64"), "an unknown dtype"),
    "a shape": (setting("inputs", 0, "shape", to=[1 << 40, 1 << 40]), "no possible shape"),
    "fewer numbers": (setting("inputs", 0, "shape", to=[1]), "not within its array"),
    "strides": (setting("inputs", 0, "strides", to=[0, 1]), "no possible strides"),
    "a tensor": (setting("constants", 0, "tensor", to="none"), "no tensor 'none'"),
    "a tensor's shape": (setting("constants", 1, "shape", to=[2, 4]), "another one than the program needs"),
    "weights elsewhere": (setting("weights", to="../secret"), "lies beside the program"),
    "a list": (lambda recording: [recording], "should be an object"),
    "an entry missing": (lambda recording: recording.pop("scratch") and None, "has no 'scratch'"),
    "a depth": (lambda recording: recording.update(inputs=json.loads("[" * 40 + "]" * 40)), "too deep"),
    "a fraction": (setting("scratch", to=0.5), "a whole number"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_recording_is_refused(what, program, runs, saved, tmp_path):
    change, says = HOSTILE[what]
    runs.add(rewritten(tmp_path / "a.mcore", saved[Pair, torch.float32][0], change))
    runs.lines *= 2
    for trusted in ("0", "1"):
        for status, _, error in runs.run(program, "--trusted", trusted):
            assert (status, says in error) == ("METALCORE_INVALID_FILE", True), error


def test_hostile_numbers_of_a_kernel_leave_no_array(program, runs, saved, tmp_path):
    """The kernel is told of more rows than there are: checking mode ends it."""

    def more(recording):
        for dispatch in recording["dispatches"]:
            for argument in dispatch["arguments"]:
                if argument[1] == "bytes":
                    argument[2] = "ffffff0f" * (len(argument[2]) // 8)

    runs.add(rewritten(tmp_path / "a.mcore", saved[Pair, torch.float32][0], more))
    ((status, _, error),) = runs.run(program)
    assert status == "METALCORE_KERNEL_FAULT" and "out-of-bounds" in error


ERRORS = """
import ctypes, sys
C = ctypes.CDLL(sys.argv[1])
C.metalcore_last_error.restype = C.metalcore_status_name.restype = ctypes.c_char_p
def said(function, *arguments):
    code = getattr(C, "metalcore_program_" + function)(*arguments)
    print(C.metalcore_status_name(code).decode(), C.metalcore_last_error().decode() if code else "")
def array(*addresses):
    return (ctypes.c_void_p * len(addresses))(*addresses)
path, program = sys.argv[2].encode(), ctypes.c_void_p()
memory = ctypes.create_string_buffer(4096)
at = (ctypes.addressof(memory) + 255) // 256 * 256
said("load", None, None, 0, ctypes.byref(program))
said("load", path, None, 2, ctypes.byref(program))
said("load", path, path, 0, ctypes.byref(program))
said("load", path, None, 0, None)
said("load", path, None, 1, ctypes.byref(program))
said("run", program, None, array(at, at))
said("run", program, array(None), array(at, at))
said("run", program, array(at + 4), array(at + 256, at + 512))
said("run", program, array(at), array(at, at + 512))
said("run", program, array(at), array(at + 256, at + 272))
said("run", program, array(-256 & (1 << 64) - 1), array(at + 256, at + 512))
said("run", None, array(at), array(at + 256, at + 512))
said("run", program, array(at), array(at + 256, at + 512))
said("input", program, 1, memory)
said("output", program, -1, memory)
said("output", program, 0, None)
said("counts", program, None, None)
said("free", program)
said("free", None)
"""


def test_arguments_are_checked(saved):
    done = python("-c", ERRORS, LIBRARY / "libmetalcore.so", saved[Pair, torch.float32][0])
    assert done.returncode == 0, done.stderr
    bad = "METALCORE_INVALID_ARGUMENT metalcore_program_"
    assert done.stdout.splitlines() == [
        f"{bad}load: path is NULL",
        f"{bad}load: flags has unknown bits",
        f"{bad}load: weights are given, and the program's are inside of it",
        f"{bad}load: program is NULL",
        "METALCORE_OK ",
        f"{bad}run: inputs or outputs is NULL",
        f"{bad}run: x is NULL",
        f"{bad}run: x does not begin at a multiple of 16",
        f"{bad}run: result_0 overlaps x",
        f"{bad}run: result_1 overlaps result_0",
        f"{bad}run: x does not fit into memory",
        f"{bad}run: program is NULL",
        "METALCORE_OK ",
        f"{bad}input: the program has no array of number 1",
        f"{bad}output: the program has no array of number -1",
        f"{bad}output: array is NULL",
        f"{bad}counts: inputs or outputs is NULL",
        "METALCORE_OK ",
        "METALCORE_OK ",
    ]
