"""Programs that are saved to files, and loaded from them."""

import copy
import json
import os
import random
import re
import threading
from pathlib import Path

import pytest
import torch
from agreement import agree, change, contents, write
from torch import nn

import metalcore
from metalcore.programs import ProgramFileError
from metalcore.programs.files import container, describe, operators

PATTERNS = ["conv_batch_norm", "layer_norm", "kernels"]  # no generated kernels, which have a test of their own


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 5)
        self.tied = self.head.bias
        self.register_buffer("scale", torch.rand(4), persistent=False)
        self.bn.running_mean.normal_()
        self.bn.running_var.uniform_(0.5, 1.5)

    def forward(self, x, low=-0.5, *, mask, soft=False):
        y = self.bn(self.conv(x)).relu().mean((2, 3))
        y = self.norm(y * self.scale).masked_fill(mask, float("-inf")).clamp(min=low)
        scores = self.head(y)
        return {"scores": (scores.softmax(-1) if soft else scores) + self.tied, "more": [y, (mask, None)]}


def arguments(device):
    mask = torch.tensor([[True, False, True, False]]).to(device)
    return (torch.randn(2, 3, 8, 8).to(device),), {"mask": mask, "soft": True}


@pytest.fixture(scope="module")
def saved(device, tmp_path_factory):
    """A module, its program, and its files with the weights inside and apart."""
    torch.manual_seed(0)
    module, (args, kwargs) = Net().eval().to(device), arguments(device)
    program = metalcore.compile(module, args, kwargs, fusions=PATTERNS)
    folder = tmp_path_factory.mktemp("programs")
    program.save(folder / "inside.mcore")
    program.save(folder / "apart.mcore", weights="apart")
    return module, program, folder


@pytest.mark.parametrize("name", ("inside", "apart"))
def test_a_loaded_program_computes_the_same(name, saved, device):
    module, program, folder = saved
    args, kwargs = arguments(device)
    loaded = metalcore.load(folder / f"{name}.mcore")
    expected, found = program(*args, **kwargs), loaded(*args, **kwargs)
    assert list(found) == ["scores", "more"] and type(found["more"]) is list and found["more"][1][1] is None
    agree(module(*args, **kwargs), found)
    assert torch.equal(expected["scores"], found["scores"])  # folded by the same operations: the same bits
    assert loaded.report().steps == program.report().steps
    assert [fused.pattern for fused in loaded.report().fused] == [fused.pattern for fused in program.report().fused]
    with pytest.raises(ValueError, match="takes arguments like"):
        loaded(*args)


def test_weights_apart_are_those_of_the_module(saved, device, tmp_path):
    module, _, folder = saved
    tensors, manifest = contents(folder / "apart.mcore")
    assert list(tensors) == ["scale"]  # no part of the module's state
    with container.Container(folder / "apart.safetensors") as file:
        assert set(file.entries) <= set(module.state_dict())
        agree(module.conv.weight.cpu(), file.read("conv.weight"))
    others = Net().eval().to(device)
    others.scale.copy_(module.scale)
    args, kwargs = arguments(device)
    loaded = metalcore.load(folder / "apart.mcore", weights=others.state_dict())
    agree(others(*args, **kwargs), loaded(*args, **kwargs))
    half = {
        name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in others.state_dict().items()
    }
    agree(others(*args, **kwargs), metalcore.load(folder / "apart.mcore", weights=half)(*args, **kwargs), 1e-2)
    assert manifest["recipe"]["constants"]
    (tmp_path / "alone.mcore").write_bytes((folder / "apart.mcore").read_bytes())
    with pytest.raises(ProgramFileError, match="give weights="):
        metalcore.load(tmp_path / "alone.mcore")
    with pytest.raises(ProgramFileError, match="no tensor"):
        metalcore.load(folder / "apart.mcore", weights={})
    with pytest.raises(TypeError, match=r"weights\['scale'\] must be a tensor, not list"):
        metalcore.load(folder / "apart.mcore", weights={**others.state_dict(), "scale": [1.0]})
    with pytest.raises(TypeError, match=r"a path or tensors by name \(a state_dict\), not Net"):
        metalcore.load(folder / "apart.mcore", weights=others)
    with pytest.raises(ValueError, match="weights are inside of it"):
        metalcore.load(folder / "inside.mcore", weights=others.state_dict())
    wrong = {**others.state_dict(), "head.weight": torch.zeros(3, 4)}
    with pytest.raises(ProgramFileError, match="shape"):
        metalcore.load(folder / "apart.mcore", weights=wrong)


def test_damaged_weights_are_noticed(saved, tmp_path):
    folder = saved[-1]
    (tmp_path / "apart.mcore").write_bytes((folder / "apart.mcore").read_bytes())
    content = bytearray((folder / "apart.safetensors").read_bytes())
    content[-5] ^= 1
    (tmp_path / "apart.safetensors").write_bytes(content)
    for path, weights in [(tmp_path, None), (folder, tmp_path / "apart.safetensors")]:
        with pytest.raises(ProgramFileError, match="damaged"):
            metalcore.load(path / "apart.mcore", weights=weights)


def test_it_is_loaded_on_another_device(saved):
    module, _, folder = saved
    args, kwargs = arguments("cpu")
    loaded = metalcore.load(folder / "inside.mcore", device="cpu")
    found = loaded(*args, **kwargs)
    assert found["scores"].device.type == "cpu"
    agree(copy.deepcopy(module).cpu()(*args, **kwargs), found)
    if next(module.parameters()).device.type != "cpu":
        assert any("compiled for" in note for note in loaded.report().notes)


@pytest.mark.parametrize("given", ("meta", torch.device("meta"), "xpu", "gpu", 3.5))
def test_a_device_without_programs_is_refused(given, saved):
    with pytest.raises(ValueError, match=f'device must be "mps", "cuda" or "cpu", and is {re.escape(repr(given))}'):
        metalcore.load(saved[-1] / "inside.mcore", device=given)


def test_a_device_that_is_not_here_is_refused(saved, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device is 'cuda:1', and this machine has none of the kind cuda"):
        metalcore.load(saved[-1] / "inside.mcore", device="cuda:1")


def test_a_loaded_program_is_saved_again(saved, device, tmp_path):
    _, program, folder = saved
    args, kwargs = arguments(device)
    loaded = metalcore.load(folder / "apart.mcore")
    loaded.save(tmp_path / "again.mcore")
    agree(program(*args, **kwargs), metalcore.load(tmp_path / "again.mcore")(*args, **kwargs))
    with pytest.raises(ValueError, match="weights='inside'"):
        loaded.save(tmp_path / "again.mcore", weights="apart")


def test_nothing_is_compiled_by_loading(device, tmp_path, monkeypatch):
    from metalcore.msl.runtime import host

    x = torch.randn(4, 6).to(device)
    program = metalcore.compile(nn.Sequential(nn.Hardswish(), nn.Softplus()), (x,))
    expected = program(x)
    program.save(tmp_path / "chain.mcore")
    monkeypatch.setattr(host, "compile_source", lambda *_, **__: pytest.fail("something is compiled"))
    loaded = metalcore.load(tmp_path / "chain.mcore")
    assert torch.equal(loaded(x), expected)
    assert loaded.generated_kernels() == program.generated_kernels()
    assert loaded.report().notes == ()
    if device != "cpu":
        tensors, manifest = contents(tmp_path / "chain.mcore")
        assert all("kernel void" in source for source in manifest["kernels"].values()) and manifest["kernels"]
        manifest["kernels"] = {"pointwise_0": "another one"}
        other = metalcore.load(write(tmp_path / "other.mcore", tensors, manifest))
        assert "others than those in the file" in other.report().notes[0]


def test_static_values_are_kept_in_the_file(device, tmp_path):
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(2))

        def forward(self, x):
            self.count.add_(x)
            return self.count * 2

    module, x = Counter().to(device), torch.ones(2).to(device)
    program = metalcore.compile(module, (x,), fusions=[])
    program(x)
    program.save(tmp_path / "counter.mcore")
    loaded = metalcore.load(tmp_path / "counter.mcore")
    assert loaded(x).tolist() == [4, 4] and loaded(x).tolist() == [6, 6]
    assert program(x).tolist() == [4, 4]


def test_what_no_file_holds_is_refused(device, tmp_path):
    class Strided(nn.Module):
        def forward(self, x):
            return torch.as_strided(x, (2,), (1,))

    program = metalcore.compile(Strided(), (torch.ones(3).to(device),))
    with pytest.raises(ValueError, match="as_strided"):
        program.save(tmp_path / "strided.mcore")
    fast = torch.compile(nn.ReLU(), backend="metalcore")
    with metalcore.programs.observe() as graphs:
        fast(torch.ones(3).to(device))
    with pytest.raises(ValueError, match=r"metalcore\.compile"):
        graphs[0].programs[0].save(tmp_path / "graph.mcore")
    assert not list(tmp_path.iterdir())


def test_outputs_of_transformers_become_dicts(device, tmp_path):
    from transformers.modeling_outputs import BaseModelOutput

    class Encoder(nn.Module):
        def forward(self, x):
            return BaseModelOutput(last_hidden_state=x * 2, hidden_states=(x + 1, x))

    x = torch.randn(2, 3).to(device)
    for name, args, kwargs in (("positional", (x,), {}), ("keyword", (), {"x": x})):
        metalcore.compile(Encoder(), args, kwargs).save(tmp_path / name)
        found = metalcore.load(tmp_path / name)(*args, **kwargs)
        assert type(found) is dict and list(found) == ["last_hidden_state", "hidden_states"]
        agree(dict(Encoder()(x)), found)


def test_named_tuples_become_tuples(device, tmp_path):
    class Best(nn.Module):
        def forward(self, x):
            return x.topk(2)

    x = torch.randn(3, 5).to(device)
    metalcore.compile(Best(), (x,)).save(tmp_path / "best.mcore")
    found = metalcore.load(tmp_path / "best.mcore")(x)
    assert type(found) is tuple
    agree(tuple(x.topk(2)), found)


def test_describe(saved):
    _, _, folder = saved
    text = describe(folder / "apart.mcore")
    for words in ("float32 2×3×8×8", "apart.safetensors", "aten::conv2d", "conv_batch_norm 1", "are computed of them"):
        assert words in text
    assert json.loads(describe(folder / "inside.mcore", manifest=True))["recipe"] is None


# What strangers may write.


def small(folder):
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))

        def forward(self, x):
            return torch.split(x * self.weight, 1)[0].masked_fill(x[:1] > 0, float("-inf"))

    program = metalcore.compile(Half(), (torch.ones(2),), fusions=[])
    program.save(folder / "small.mcore")
    return folder / "small.mcore"


def test_a_cut_file_is_refused(tmp_path):
    path = small(tmp_path)
    data = path.read_bytes()
    for size in [*range(0, len(data), 97), len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(ProgramFileError):
            metalcore.load(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(ProgramFileError):
        metalcore.load(path)


def test_a_changed_byte_is_noticed(tmp_path):
    path = small(tmp_path)
    data = path.read_bytes()
    draw = random.Random(0)
    for place in [*range(16), *(draw.randrange(len(data)) for _ in range(150)), *range(len(data) - 8, len(data))]:
        changed = bytearray(data)
        changed[place] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(ProgramFileError):
            metalcore.load(path)


HOSTILE = {
    "an unknown entry": (["more"], 1),
    "an unknown operator": (["operations", 0, "operator"], "aten::no_such_thing"),
    "an operator of a file": (["operations", 0, "operator"], "aten::from_file"),
    "an operator of memory": (["operations", 0, "operator"], "aten::as_strided"),
    "an operator into memory": (["operations", 0, "operator"], "aten::mul.out"),
    "an operator of another library": (["operations", 0, "operator"], "prims::mul"),
    "an internal operator": (["operations", 0, "operator"], "metalcore::_run_generated"),
    "an attribute of Python": (["operations", 0, "operator"], "aten::__class__"),
    "an attribute of an operator": (["operations", 0, "operator"], "aten::mul._schema"),
    "code as a name": (["operations", 0, "name"], "x = __import__('os')"),
    "a keyword as a name": (["operations", 0, "name"], "return"),
    "a name of Python": (["inputs", 0, "name"], "self"),
    "code as an option": (["operations", 0, "options"], {"alpha=__import__('os').abort()": 1}),
    "a value of itself": (["operations", 0, "arguments", 0], {"value": "mul"}),
    "a later value": (["operations", 0, "arguments", 0], {"value": "masked_fill"}),
    "no value": (["operations", 0, "arguments", 0], {"value": "nothing"}),
    "a wrong type": (["operations", 0, "arguments", 0], "text"),
    "an unknown kind": (["operations", 0, "arguments", 0], {"object": "os"}),
    "two kinds": (["operations", 0, "arguments", 0], {"value": "x", "dtype": "float32"}),
    "another number": (["operations", 0, "arguments", 1], {"float": "infinity"}),
    "no complex number": (["operations", 0, "arguments", 1], {"complex": "__import__('os')"}),
    "an infinite complex number": (["operations", 0, "arguments", 1], {"complex": "infj"}),
    "too many arguments": (["operations", 0, "arguments"], [1] * 9),
    "another shape": (["operations", 0, "gives"], ["float32[3]"]),
    "an operation twice": (["operations", 1, "name"], "mul"),
    "a huge shape": (["inputs", 0, "shape"], [1 << 40, 1 << 40]),
    "a negative shape": (["inputs", 0, "shape"], [-2]),
    "a fraction of a shape": (["inputs", 0, "shape"], [2.0]),
    "true as a shape": (["inputs", 0, "shape"], [True, True]),
    "overlapping strides": (["inputs", 0, "strides"], [0]),
    "an unknown dtype": (["inputs", 0, "dtype"], "float31"),
    "an attribute as a dtype": (["inputs", 0, "dtype"], "nn"),
    "another device": (["inputs", 0, "device"], "meta"),
    "another shape of a parameter": (["parameters", 0, "shape"], [200]),
    "another kind of a parameter": (["parameters", 0, "dtype"], "int32"),
    "no tensor": (["parameters", 0, "tensor"], "../../etc/passwd"),
    "weights elsewhere": (["weights"], "../weights.safetensors"),
    "no name of weights": (["weights"], ".."),
    "a structure of another size": (["arguments"], {"tuple": []}),
    "an unknown structure": (["results"], {"namedtuple": ["leaf"]}),
    "a deep structure": (["results"], None),
    "no outputs": (["outputs"], []),
    "unknown memory": (["memory"], "disk"),
    "a list for an object": (["kernels"], []),
    "kernels that are no text": (["kernels"], {"a": 1}),
    "a result of a tensor": (["outputs"], [{"value": "split"}]),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_manifest_is_refused(what, tmp_path):
    set_entry, manifest = change(small(tmp_path))
    assert manifest["operations"][0]["name"] == "mul"
    places, new = HOSTILE[what]
    if what == "a deep structure":
        new = "leaf"
        for _ in range(400):
            new = {"list": [new, new]} if not isinstance(new, dict) else {"list": [new]}
    with pytest.raises(ProgramFileError):
        metalcore.load(set_entry(places, new))


def test_a_recipe_cannot_grow(saved, tmp_path):
    _, _, folder = saved
    tensors, manifest = contents(folder / "apart.mcore")
    first = manifest["recipe"]["parameters"][0]
    operation = {
        "name": "huge",
        "operator": "aten::full",
        "arguments": [[1 << 30], 0],
        "options": {},
        "gives": [f"int64[{1 << 30}]"],
    }
    manifest["recipe"]["operations"].insert(0, operation)
    write(tmp_path / "huge.mcore", tensors, manifest)
    assert first["names"]
    with pytest.raises(ProgramFileError, match="far more than it is made of"):
        metalcore.load(tmp_path / "huge.mcore", weights=folder / "apart.safetensors")


@pytest.mark.parametrize(
    "text", ('{"a": NaN}', '{"a": 1e999}', '{"a": 1, "a": 2}', "[" * 100_000, "{", '{"a": ' + "9" * 5000 + "}", "[]")
)
def test_a_manifest_that_is_no_json_is_refused(text, tmp_path):
    with pytest.raises(ProgramFileError):
        metalcore.load(write(tmp_path / "a.mcore", {}, text))


def test_other_files_are_refused(tmp_path):
    path = small(tmp_path)
    tensors, manifest = contents(path)
    with pytest.raises(ProgramFileError, match="of version '3'"):
        metalcore.load(write(tmp_path / "new.mcore", tensors, manifest, version="3"))
    with pytest.raises(ProgramFileError, match="is no program"):
        metalcore.load(write(tmp_path / "other.mcore", tensors, manifest, format="pt"))
    container.write(tmp_path / "weights.safetensors", tensors, {})
    with pytest.raises(ProgramFileError, match="is no program"):
        metalcore.load(tmp_path / "weights.safetensors")
    with pytest.raises(FileNotFoundError):
        metalcore.load(tmp_path / "none.mcore")
    with pytest.raises(IsADirectoryError):
        metalcore.load(tmp_path)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        writer = threading.Thread(target=lambda: open(tmp_path / "pipe", "wb").close())
        writer.start()
        with pytest.raises(ProgramFileError, match="no regular file"):
            metalcore.load(tmp_path / "pipe")
        writer.join()


def test_files_are_those_of_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {"a": torch.arange(6.0).view(2, 3).T, "b": torch.tensor([True]), "c": torch.empty(0, 3).half()}
    container.write(tmp_path / "ours", tensors, {"format": "pt"})
    found = safetensors.load_file(tmp_path / "ours")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    safetensors.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "theirs")
    with container.Container(tmp_path / "theirs") as file:
        assert all(torch.equal(file.read(name), tensor) for name, tensor in tensors.items())


def test_headers_that_do_not_fit_are_refused(tmp_path):
    good = {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    wrong = (
        {"a": {**good["a"], "shape": [2]}},
        {"a": {**good["a"], "shape": [1 << 62, 1 << 62]}},
        {"a": {**good["a"], "data_offsets": [4, 8]}},
        {"a": {**good["a"], "data_offsets": [0, 4, 4]}},
        {"a": {**good["a"], "dtype": "F31"}},
        {"a": {**good["a"], "more": 1}},
        {"a": good["a"], "b": good["a"]},
        {"__metadata__": {"a": 1}, **good},
        [],
    )
    for header in (good, *wrong):
        text = json.dumps(header).encode()
        (tmp_path / "file").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
        if header is good:
            with container.Container(tmp_path / "file") as file:
                assert file.read("a").tolist() == [0.0]
            continue
        with pytest.raises(ProgramFileError):
            container.Container(tmp_path / "file")
    text = b'{"a":{"dtype":"BOOL","shape":[1],"data_offsets":[0,1]}}'
    (tmp_path / "file").write_bytes(len(text).to_bytes(8, "little") + text + b"\2")
    with (
        container.Container(tmp_path / "file") as file,
        pytest.raises(ProgramFileError, match="neither true nor false"),
    ):
        file.read("a")


def test_files_may_have_the_operators_of_all_patterns():
    folder = Path(metalcore.programs.patterns.__file__).parent
    found = {name for path in folder.glob("*.py") for name in re.findall(r"ops\.metalcore\.(\w+)", path.read_text())}
    assert {"rms_norm", "gated", "group_norm"} <= found
    assert not [name for name in (*found, "rope", "attention", "matmul") if not operators.find(f"metalcore::{name}")]


def test_weights_apart_of_a_module_that_has_none(device, tmp_path):
    x = torch.randn(3, 4).to(device)
    metalcore.compile(nn.Tanh(), (x,)).save(tmp_path / "tanh.mcore", weights="apart")
    agree(x.tanh(), metalcore.load(tmp_path / "tanh.mcore")(x))


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_a_dimension_that_is_none_is_refused(device, name, tmp_path):
    x = torch.randn(3, 4).to(device)
    metalcore.compile(nn.Softmax(-1) if name == "softmax" else nn.LogSoftmax(-1), (x,)).save(tmp_path / "one.mcore")
    set_entry, manifest = change(tmp_path / "one.mcore")
    operation = manifest["operations"][0]
    path = set_entry(["operations", 0, "arguments"], [operation["arguments"][0], -6, *operation["arguments"][2:]])
    with pytest.raises(ProgramFileError):
        metalcore.load(path)
