"""Packed artifacts come from strangers: what is not right is refused, and nothing is written."""

import contextlib
import io
import json
import random
import zipfile

import pytest
import torch

from metalcore import golden
from metalcore._core.registry import OPS
from metalcore.golden import artifact, packing


@pytest.fixture(scope="module")
def folder(device, tmp_path_factory):
    made = tmp_path_factory.mktemp("golden")
    list(golden.record([OPS["silu"]], device, made, ("edge",), ("float32",)))
    return made


@pytest.fixture(scope="module")
def packed(folder):
    file = folder.parent / f"{folder.name}.zip"
    golden.pack(folder, file)
    return file.read_bytes()


def refused(tmp_path, data):
    file, out = tmp_path / "file", tmp_path / "out"
    file.write_bytes(data)
    with pytest.raises(ValueError, match="is no packed|is damaged"):
        golden.unpack(file, out)
    assert not out.exists() and sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_the_same_folder_makes_the_same_file(folder, packed, tmp_path):
    golden.pack(folder, tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == packed


@pytest.mark.parametrize(
    "name", ["../x/meta.json", "/x/meta.json", "x/y/meta.json", "x\\meta.json", "x/else", "..", "x/"]
)
def test_names_that_lead_elsewhere(packed, tmp_path, name):
    data = io.BytesIO(packed)
    with zipfile.ZipFile(data, "a") as archive:
        archive.writestr(zipfile.ZipInfo(name), b"")
    refused(tmp_path, data.getvalue())


def test_links_and_files_that_are_not_listed(packed, tmp_path):
    for mode in (0o120777, 0o020666, 0o100644):
        data = io.BytesIO(packed)
        with zipfile.ZipFile(data, "a") as archive:
            entry = zipfile.ZipInfo("x/values.bin")
            entry.external_attr = mode << 16
            archive.writestr(entry, b"/etc/passwd")
        refused(tmp_path, data.getvalue())


def test_bombs(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "_MOST_BYTES", 1 << 20)
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/values.bin", bytes(2 << 20))
    refused(tmp_path, data.getvalue())
    # One that says that it is small.
    honest = data.getvalue()
    refused(tmp_path, honest.replace((2 << 20).to_bytes(4, "little"), (1 << 10).to_bytes(4, "little")))


def test_damaged_archives(packed, tmp_path):
    """Every one of them is refused, or (where a byte means nothing) unpacked unharmed."""
    numbers = random.Random(0)
    good = packing.read(_written(tmp_path, packed))
    for _ in range(150):
        data = bytearray(packed)
        if numbers.random() < 0.3:
            del data[numbers.randrange(len(data)) :]
        else:
            for _ in range(numbers.choice((1, 1, 8))):
                data[numbers.randrange(len(data))] ^= 1 << numbers.randrange(8)
        with contextlib.suppress(ValueError):
            assert packing.read(_written(tmp_path, bytes(data))) == good


def _written(tmp_path, data):
    file = tmp_path / "file"
    file.write_bytes(data)
    return file


def test_a_folder_with_other_files(folder, tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match="is no file of an artifact"):
        golden.pack(tmp_path, tmp_path / "out")
    (tmp_path / "made").mkdir()
    with pytest.raises(ValueError, match="has no artifacts"):
        golden.pack(tmp_path / "made", tmp_path / "out")


def damage(meta, name, value):
    meta[name] = value
    return meta


@pytest.mark.parametrize(
    "change",
    [
        lambda meta: damage(meta, "format", 99),
        lambda meta: [],
        lambda meta: damage(meta, "tensors", [{}]),
        lambda meta: damage(meta, "tensors", [{**meta["tensors"][0], "shape": [-1]}]),
        lambda meta: damage(meta, "tensors", [{**meta["tensors"][0], "shape": [2**62, 2**62], "numbers": 2**60}]),
        lambda meta: damage(meta, "tensors", [{**meta["tensors"][0], "dtype": "object"}]),
        lambda meta: damage(meta, "tensors", [{**meta["tensors"][0], "tolerance": float("inf")}]),
        lambda meta: damage(meta, "tensors", meta["tensors"] * 2),
        lambda meta: damage(meta, "tensors", meta["tensors"][:1]),
    ],
)
def test_damaged_artifacts(folder, tmp_path, change):
    source = next(folder.iterdir())
    for name in ("meta.json", "values.bin"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    artifact.load(tmp_path)
    (tmp_path / "meta.json").write_text(json.dumps(change(json.loads((source / "meta.json").read_text()))))
    with pytest.raises(ValueError, match="is no golden artifact"):
        artifact.load(tmp_path)


def test_truncated_artifacts(folder, tmp_path):
    source = next(folder.iterdir())
    for name in ("meta.json", "values.bin"):
        data = (source / name).read_bytes()
        for other in ("meta.json", "values.bin"):
            (tmp_path / other).write_bytes((source / other).read_bytes())
        (tmp_path / name).write_bytes(data[: len(data) // 2])
        with pytest.raises(ValueError, match="is no golden artifact"):
            artifact.load(tmp_path)
        (tmp_path / name).unlink()
        with pytest.raises(ValueError, match="is no golden artifact"):
            artifact.load(tmp_path)


def test_other_inputs_are_told(device, folder, tmp_path):
    source = next(folder.iterdir())
    made = tmp_path / source.name
    made.mkdir()
    meta = json.loads((source / "meta.json").read_text())
    for change, problem in ((("inputs", "0" * 64), "the inputs differ"), (("seed", 1), "the inputs differ")):
        (made / "meta.json").write_text(json.dumps({**meta, change[0]: change[1]}))
        (made / "values.bin").write_bytes((source / "values.bin").read_bytes())
        (row,) = golden.compare(tmp_path, device)
        assert not row.right and problem in row.problem
    made.rename(tmp_path / "silu_edge_other_float32")
    (row,) = golden.compare(tmp_path, device)
    assert not row.right and "no such case" in row.problem
    assert torch.is_tensor(artifact.load(source).tensors[0])
