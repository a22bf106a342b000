"""The reader of GGUF files, and `python -m metalcore gguf info`: what gguf-py writes, and files that are damaged or
hostile."""

import json
import random
import re
import struct
import tracemalloc

import numpy as np
import pytest
import torch

from metalcore import cli
from metalcore.gguf import GGUFError, GGUFFile

gguf = pytest.importorskip("gguf")

KINDS = [kind for kind in gguf.GGUFValueType if kind.name not in ("ARRAY", "STRING")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A file with metadata of every type."""
    path = tmp_path_factory.mktemp("reader") / "x.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    for kind in KINDS:
        value = 1.5 if kind.name.startswith("FLOAT") else kind.name == "BOOL" or 3
        writer.add_key_value(f"one.{kind.name}", value, kind)
        writer.add_key_value(f"many.{kind.name}", [value] * 3, gguf.GGUFValueType.ARRAY, sub_type=kind)
    writer.add_string("text", "ñ\n")
    writer.add_array("texts", ["a", "", "ñ"])
    writer.add_tensor("a", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("b", np.arange(68, dtype=np.uint8).reshape(2, 34), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_everything_is_read(whole):
    file = GGUFFile(whole)
    for kind in KINDS:
        one, many = file.metadata[f"one.{kind.name}"], file.metadata[f"many.{kind.name}"]
        assert one in (1.5, True, 3) and list(many) == [one] * 3 and type(many[0]) is type(one)
    assert file.metadata["text"] == "ñ\n" and file.metadata["texts"] == ["a", "", "ñ"]
    assert file.tensors["a"].shape == (2, 3) and file.tensors["b"].shape == (2, 32)
    assert torch.equal(file.packed("a").view(torch.float32), torch.arange(6.0).view(2, 3))
    assert torch.equal(file.packed("b"), torch.arange(68, dtype=torch.uint8).view(2, 34))
    assert file.tensors["b"].type.name == "Q8_0"


def test_tensors_keep_the_file_mapped(whole):
    values = GGUFFile(whole).packed("a")
    assert values.view(torch.float32).sum() == 15


def test_every_truncation_is_refused(whole, tmp_path):
    """At each byte but those after the last tensor's."""
    data, last = whole.read_bytes(), GGUFFile(whole).tensors["b"]
    path = tmp_path / "x.gguf"
    for length in range(last.offset + last.nbytes):
        path.write_bytes(data[:length])
        with pytest.raises(GGUFError, match="x.gguf: "):
            GGUFFile(path)
    path.write_bytes(data[: last.offset + last.nbytes])
    GGUFFile(path)


def test_random_damage_is_an_error_or_a_file(whole, tmp_path):
    """Whatever is said of each byte, nothing else is raised, and what is read lies in the file."""
    data, path = whole.read_bytes(), tmp_path / "x.gguf"
    chance, refused = random.Random(0), 0
    for _ in range(800):
        damaged = bytearray(data)
        for _ in range(chance.choice((1, 1, 2, 8))):
            at = chance.randrange(len(damaged) - 128)
            damaged[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
        path.write_bytes(damaged)
        try:
            file = GGUFFile(path)
        except GGUFError:
            refused += 1
            continue
        for name, info in file.tensors.items():
            assert info.offset + info.nbytes <= len(data)
            assert file.packed(name).numel() == info.nbytes
    assert 150 < refused < 800


class Bytes:
    """A file, piece by piece."""

    def __init__(self, tensors=0, keys=0, version=3):
        self.data = b"GGUF" + struct.pack("<IQQ", version, tensors, keys)

    def text(self, text, length=None):
        self.data += struct.pack("<Q", len(text) if length is None else length) + text
        return self

    def numbers(self, letters, *values):
        self.data += struct.pack("<" + letters, *values)
        return self

    def tensor(self, name=b"t", shape=(32,), type=0, offset=0, dimensions=None):
        self.text(name).numbers("I", len(shape) if dimensions is None else dimensions)
        return self.numbers("Q" * len(shape) + "IQ", *shape, type, offset)

    def key(self, key=b"k", kind=4):
        return self.text(key).numbers("I", kind)

    def end(self, count=512):
        self.data += bytes(-len(self.data) % 32 + count)
        return self


BIG = 2**64 - 1
HOSTILE = {
    "another magic": (b"GGML" + bytes(60), "header at byte 0: a GGUF file begins with GGUF, and this one with b'GGML'"),
    "version 1": (Bytes(version=1), "version 1; metalcore reads 2 and 3"),
    "version 4": (Bytes(version=4), "version 4"),
    "big-endian": (Bytes(version=0x03000000), "big-endian"),
    "tensors": (Bytes(tensors=BIG).end(), "18446744073709551615 tensors and 0 keys do not fit into"),
    "keys": (Bytes(keys=2**40).end(), "1099511627776 keys do not fit"),
    "length of a key": (Bytes(keys=1).text(b"k", BIG).end(), "key 1 of 1 at byte 32: a name of 18446744073709551615"),
    "no key": (Bytes(keys=1).key(b"").end(), "an empty name"),
    "key of no text": (Bytes(keys=1).key(b"\xff").numbers("I", 1).end(), "the name b'.xff' is not UTF-8"),
    "type of a key": (Bytes(keys=1).key(kind=13).end(), "key 'k' at byte 37: unknown type 13 of metadata"),
    "same key": (
        Bytes(keys=2).key().numbers("I", 1).key().numbers("I", 1).end(),
        "key 'k' at byte .*: it is there twice",
    ),
    "length of a text": (Bytes(keys=1).key(kind=8).text(b"", 2**63).end(), "key 'k' at byte .* bytes are needed, and"),
    "array": (Bytes(keys=1).key(kind=9).numbers("IQ", 4, 2**62).end(), "18446744073709551616 bytes are needed"),
    "texts": (Bytes(keys=1).key(kind=9).numbers("IQ", 8, 2**61).end(), "18446744073709551616 bytes are needed"),
    "nested array": (Bytes(keys=1).key(kind=9).numbers("IQ", 9, 1).end(), "an array of arrays"),
    "type of an array": (Bytes(keys=1).key(kind=9).numbers("IQ", 99, 1).end(), "an array of unknown type 99"),
    "boolean": (Bytes(keys=1).key(kind=7).numbers("B", 2).end(), "a boolean is 0 or 1, and not 2"),
    "alignment": (Bytes(0, 1).key(b"general.alignment").numbers("I", 48).end(), "a power of two, and not 48"),
    "alignment 0": (Bytes(0, 1).key(b"general.alignment").numbers("I", 0).end(), "a power of two, and not 0"),
    "no alignment": (Bytes(0, 1).key(b"general.alignment", 8).text(b"32").end(), "a power of two, and not '32'"),
    "name": (Bytes(1).tensor(b"t" * 65).end(), "a name of 65 bytes; 64 are allowed"),
    "dimensions": (Bytes(1).tensor(shape=(1,) * 5).end(), "tensor 't' at byte .*: 5 dimensions; GGML has at most 4"),
    "many dimensions": (Bytes(1).tensor(dimensions=2**32 - 1).end(), "4294967295 dimensions"),
    "no elements": (Bytes(1).tensor(shape=(32, 0)).end(), r"shape \(0, 32\) has no elements"),
    "shape": (Bytes(1).tensor(shape=(2**32, 2**32)).end(), "has 73786976294838206464 bytes, and the file"),
    "shape that overflows": (Bytes(1).tensor(shape=(2**62, 16)).end(), "bytes, and the file"),
    "type": (Bytes(1).tensor(type=4).end(), "tensor 't' at byte .*: unknown type 4"),
    "block": (Bytes(1).tensor(type=12).end(), "Q4_K's blocks of 256 do not divide rows of 32"),
    "offset": (Bytes(1).tensor(offset=2**63).end(), "it is at bytes .* and the file has"),
    "offset at the end": (Bytes(1).tensor(offset=480).end(), "it is at bytes .* and the file has"),
    "offset between": (Bytes(1).tensor(offset=8).end(), "offset 8 is not a multiple of the alignment 32"),
    "overlap": (Bytes(2).tensor().tensor(b"u", offset=96).end(), "tensor 'u' .* inside of 't', which ends at"),
    "same tensor": (Bytes(2).tensor().tensor(offset=128).end(), "tensor 't' at byte .*: it is there twice"),
}


@pytest.mark.parametrize("name", list(HOSTILE))
def test_hostile_files(tmp_path, name):
    data, message = HOSTILE[name]
    path = tmp_path / "x.gguf"
    path.write_bytes(data if isinstance(data, bytes) else data.data)
    tracemalloc.start()
    try:
        with pytest.raises(GGUFError) as error:
            GGUFFile(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 18
    finally:
        tracemalloc.stop()
    assert re.search(f"x.gguf: .*{message}", str(error.value))


def test_empty_files_and_folders(tmp_path):
    (tmp_path / "x.gguf").touch()
    with pytest.raises(GGUFError, match="the file is empty"):
        GGUFFile(tmp_path / "x.gguf")
    with pytest.raises(OSError, match="directory"):
        GGUFFile(tmp_path)


def test_text_that_is_not_utf8_is_kept(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(Bytes(keys=1).key(kind=8).text(b"a\xff").end().data)
    assert GGUFFile(path).metadata["k"].encode(errors="surrogateescape") == b"a\xff"


pytest.importorskip("gguf")


def test_text(made, capsys):
    assert cli.main(["gguf", "info", made("llama").path]) == 0
    out = capsys.readouterr().out
    assert "layout     llama\nloads      yes\n" in out
    assert 'tokenizer.ggml.tokens = [!, ", #, $, …] (288)' in out
    assert "Q4_K              7          589,824          331,776    4.500  yes" in out
    assert "blk.0.attn_q.weight" not in out


def test_tensors_and_json(made, capsys):
    assert cli.main(["gguf", "info", made("gpt-oss").path, "--tensors", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["loads"] is True and found["types"]["MXFP4"]["kernel"] is True
    experts = next(one for one in found["tensors"] if one["name"] == "blk.0.ffn_up_exps.weight")
    assert experts["shape"] == [4, 256, 256] and len(found["metadata"]["tokenizer.ggml.tokens"]) == 288
    assert sum(one["bytes"] for one in found["tensors"]) == sum(of["bytes"] for of in found["types"].values())
    assert cli.main(["gguf", "info", made("gpt-oss").path, "--tensors"]) == 0
    assert "4 × 256 × 256" in capsys.readouterr().out


def test_files_that_do_not_load(tmp_path, capsys):
    import gguf

    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "falcon")
    writer.add_string("text", "\x1b[31m" + "a" * 90)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert cli.main(["gguf", "info", str(tmp_path / "x.gguf")]) == 0
    out = capsys.readouterr().out
    assert "loads      no: architecture 'falcon' cannot be loaded" in out
    assert "text = \\x1b[31m" in out and "… (98 characters)" in out
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert cli.main(["gguf", "info", str(tmp_path / "x.gguf")]) == 2
    assert "metalcore gguf: " in capsys.readouterr().err
