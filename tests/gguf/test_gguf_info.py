"""python -m metalcore gguf info."""

import json

import pytest

from metalcore import cli

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
