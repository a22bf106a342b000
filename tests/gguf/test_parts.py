"""Models in several files are loaded from any part, and written."""

import json
import shutil

import layouts
import pytest
import torch
from changed import changed

from metalcore import cli, gguf


@pytest.fixture(scope="module")
def split(made, tmp_path_factory):
    """A folder with the parts of a mixtral, its layout's file as one, and the parts' paths."""
    folder = tmp_path_factory.mktemp("parts")
    model = gguf.load(made("mixtral").path, tokenizer=False).model
    paths = gguf.save_gguf(model, folder / "m.gguf", max_size=1_500_000)
    assert gguf.save_gguf(model, folder / "one.gguf", max_size=10**9) == [folder / "one.gguf"]
    return folder, paths


def write(path, keys, tensors=("a",), architecture="llama"):
    writer = layouts.gguf.GGUFWriter(str(path), architecture)
    for (key, value), add in zip(keys.items(), (writer.add_uint16, writer.add_uint16, writer.add_int32)):
        add(f"split.{key}", value)
    for name in tensors:
        writer.add_tensor(name, torch.ones(32).numpy())
    layouts.finish(writer)


@torch.no_grad()
def test_any_part_loads_the_model(split):
    folder, paths = split
    assert [path.name for path in paths] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert sorted(path.name for path in folder.iterdir()) == [path.name for path in paths] + ["one.gguf"]
    one = gguf.load(folder / "one.gguf", tokenizer=False).model
    expected = one(layouts.tokens()).logits
    for path in paths:
        model = gguf.load(path, tokenizer=False).model
        assert torch.equal(model(layouts.tokens()).logits, expected)
        assert model.config.to_dict() == one.config.to_dict()


def test_the_parts_are_as_gguf_split_writes_them(split):
    folder, paths = split
    files = [gguf.GGUFFile(path) for path in paths]
    one = gguf.GGUFFile(folder / "one.gguf")
    names = [name for file in files for name in file.tensors]
    assert names == list(one.tensors) and all(file.tensors for file in files)
    assert all(sum(info.nbytes for info in file.tensors.values()) <= 1_500_000 for file in files)
    for number, file in enumerate(files):
        found = {key: value for key, value in file.metadata.items() if key.startswith("split.")}
        assert found == {"split.no": number, "split.count": 3, "split.tensors.count": len(names)}
    assert {key: files[0].metadata[key] for key in one.metadata} == one.metadata
    # The types of these keys that llama.cpp insists on.
    fields = layouts.gguf.GGUFReader(paths[1]).fields
    kinds = [fields[f"split.{key}"].types[0].name for key in ("no", "count", "tensors.count")]
    assert kinds == ["UINT16", "UINT16", "INT32"]


def test_a_first_part_without_tensors(tmp_path, made):
    """gguf-split --no-tensor-first-split, and gguf-py's small_first_shard."""

    def change(writer):
        every = list(writer.tensors[0].items())
        writer.tensors = [{}, dict(every[:9]), dict(every[9:])]

    changed(tmp_path, change)
    one = gguf.load(made("llama-plain").path, tokenizer=False).model.state_dict()
    for number in (1, 3):
        model, tokenizer = gguf.load(tmp_path / f"x-0000{number}-of-00003.gguf")
        assert all(torch.equal(value, one[name]) for name, value in model.state_dict().items())
        assert tokenizer.encode("the") == [259]


def test_info_shows_the_parts(split, capsys):
    _, paths = split
    assert cli.main(["gguf", "info", str(paths[1])]) == 0
    out = capsys.readouterr().out
    assert f"part 3     {paths[2]}: " in out and "loads      yes" in out and "Q8_0" in out
    assert cli.main(["gguf", "info", str(paths[2]), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["loads"] is True and [part["file"] for part in found["parts"]] == list(map(str, paths))


def test_a_part_is_missing(split, tmp_path, capsys):
    _, paths = split
    for path in (paths[0], paths[2]):
        shutil.copy(path, tmp_path)
    lone = tmp_path / paths[2].name
    with pytest.raises(gguf.GGUFError, match=r"m-00003-of-00003.gguf: part 2 of 3 is missing: .*m-00002-of-00003.gguf"):
        gguf.load(lone)
    assert cli.main(["gguf", "info", str(lone)]) == 0
    assert "loads      no: part 2 of 3 is missing" in capsys.readouterr().out
    renamed = tmp_path / "model.gguf"
    shutil.copy(paths[0], renamed)
    with pytest.raises(gguf.GGUFError, match="part 1 of 3; its name must end in -00001-of-00003.gguf"):
        gguf.load(renamed)


@pytest.mark.parametrize(
    "keys, tensors, architecture, message",
    [
        ({"no": 0, "count": 3, "tensors.count": 29}, ("a",), "llama", "it belongs to another model: split.no"),
        ({"no": 1, "count": 2, "tensors.count": 29}, ("a",), "llama", r"are \(1, 2, 29\), and .* needs \(1, 3, 29\)"),
        ({"no": 1, "count": 3, "tensors.count": 28}, ("a",), "llama", "it belongs to another model"),
        ({}, ("a",), "llama", r"are \(None, None, None\)"),
        ({"no": 1, "count": 3, "tensors.count": 29}, ("a",), "qwen2", "'qwen2', and .* is 'llama'"),
        (
            {"no": 1, "count": 3, "tensors.count": 29},
            ("output.weight",),
            "llama",
            "tensor 'output.weight' is in .* too",
        ),
        ({"no": 1, "count": 3, "tensors.count": 29}, ("a",), "llama", "tensors, and split.tensors.count is 29"),
    ],
)
def test_a_part_of_another_model(split, tmp_path, keys, tensors, architecture, message):
    _, paths = split
    count = len(gguf.GGUFFile(split[0] / "one.gguf").tensors)
    keys = {key: count + value - 29 if key == "tensors.count" else value for key, value in keys.items()}
    for path in (paths[0], paths[2]):
        shutil.copy(path, tmp_path)
    write(tmp_path / paths[1].name, keys, tensors, architecture)
    with pytest.raises(gguf.GGUFError, match=message.replace("29", str(count))):
        gguf.load(tmp_path / paths[0].name)


@pytest.mark.parametrize("size", [0, -1, 1.5, "2G", True])
def test_sizes_that_are_none(split, size, tmp_path):
    with pytest.raises(ValueError, match="save_gguf: max_size must be a positive int, not"):
        gguf.save_gguf(gguf.load(split[1][0], tokenizer=False).model, tmp_path / "x.gguf", max_size=size)
