"""Broken safetensors files and indexes are refused in one sentence."""

import pickle
import struct
from pathlib import Path

import pytest

from ds_lgamp.checkpoint.files import CheckpointError
from ds_lgamp.checkpoint.whole import read_safetensors
from tests.checkpoint.forging import Attack


def safetensors_file(header, data=b""):
    return struct.pack("<Q", len(header)) + header + data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x10",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 100) + b"{}",
        safetensors_file(b"no json"),
        safetensors_file(b"[]"),
        safetensors_file(b"\xff\xfe"),
        safetensors_file(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'),
        safetensors_file(b'{"a": {"dtype": "F32", "shape": [4611686018427387904], "data_offsets": [0, 4]}}', bytes(4)),
        safetensors_file(b'{"a": {"dtype": "CODE", "shape": [1], "data_offsets": [0, 4]}}', bytes(4)),
        safetensors_file(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', bytes(4)),
        safetensors_file(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}', bytes(4)),
        safetensors_file(b'{"__metadata__": {"ds_lgamp.buffers": "[3]"}}'),
        safetensors_file(b'{"__metadata__": {"ds_lgamp.buffers": "no json"}}'),
        safetensors_file(b'{"__metadata__": {"ds_lgamp.names": "[]"}}'),
        safetensors_file(b'{"__metadata__": {"ds_lgamp.names": "{\\"a\\": 3}"}}'),
        pickle.dumps(Attack(Path("marker"))),
    ],
    ids=lambda data: repr(data[:70]),
)
def test_a_broken_safetensors_file_is_refused(tmp_path, monkeypatch, data):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(data)
    for source in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(CheckpointError) as error:
            read_safetensors(source)
        assert "model.safetensors cannot be read as a safetensors file (" in str(error.value)
        assert "\n" not in str(error.value)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    "index",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"0.weight": 3}}',
        '{"weight_map": {"0.weight": "../secret.safetensors"}}',
        '{"weight_map": {"0.weight": "/etc/passwd"}}',
        '{"weight_map": {"0.weight": ".."}}',
    ],
)
def test_a_broken_index_of_safetensors_files_is_refused(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match="index.json is not an index of safetensors files"):
        read_safetensors(tmp_path)
