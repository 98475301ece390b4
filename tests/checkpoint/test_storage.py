"""Any reader of torch.distributed.checkpoint reads the files of a checkpoint. Damaged files are refused."""

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ds_lgamp.checkpoint.files import CheckpointError, DamageError, checksum_of
from ds_lgamp.checkpoint.ranges import FlatShard, boxes
from ds_lgamp.checkpoint.storage import (
    INDEX,
    METADATA,
    ChecksummedWriter,
    ShardLoadPlanner,
    ShardSavePlanner,
    VerifyingReader,
)
from ds_lgamp.checkpoint.whole import read_whole, verify
from testing.checkpoints import content, example, flip, items_file, tensors_folder, written

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


class CutShard(FlatShard):
    """A whole tensor, written as by two ranks: one has the elements up to ``cut``, the other the rest."""

    def __init__(self, values, cut):
        super().__init__(values.shape, 0, values.reshape(-1))
        halves = boxes(values.shape, 0, cut) + boxes(values.shape, cut, values.numel())
        self._boxes = {box.offsets: box for box in halves}


@pytest.fixture
def checkpoint(tmp_path):
    return written(tmp_path / "run" / "tag")


def keys_and_tensors():
    """Returns the example's tensors under their names in a checkpoint."""
    whole = example()
    tensors = {f"parameters/{name}": tensor for name, tensor in whole.parameters.items() if tensor.numel()}
    tensors |= {f"buffers/0/{name}": tensor for name, tensor in whole.buffers.items()}
    for key, moments in whole.moments.items():
        tensors |= {f"optimizer/{key}/{name}": tensor for name, tensor in moments.items()}
    return tensors


def save(folder, shards):
    writer = ChecksummedWriter(folder)
    dcp.save(shards, storage_writer=writer, planner=ShardSavePlanner(), no_dist=True)
    return VerifyingReader(folder, checksum_of((folder / INDEX).read_bytes()))


def test_all_that_was_written_comes_back_in_order(checkpoint):
    back = read_whole(checkpoint)
    assert content(back) == content(example())
    assert list(back.parameters) == list(example().parameters)


def test_dcp_loads_the_folder_with_its_own_reader(checkpoint):
    expected = keys_and_tensors()
    loaded = {name: torch.full_like(tensor, 9) for name, tensor in expected.items()}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(tensors_folder(checkpoint)), no_dist=True)
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name


def test_dcp_converts_the_folder_into_one_file(checkpoint, tmp_path):
    dcp_to_torch_save(tensors_folder(checkpoint), tmp_path / "all.pt")
    converted = torch.load(tmp_path / "all.pt", weights_only=True)
    for name, tensor in keys_and_tensors().items():
        assert torch.equal(converted[name], tensor), name


@pytest.mark.parametrize("cut", [1, 5, 7, 20, 39])
def test_a_tensor_in_parts_is_read_whole_and_in_other_parts(tmp_path, cut):
    values = torch.randn(4, 2, 5)
    reader = save(tmp_path / "tensors", {"parameters/0.weight": CutShard(values, cut)})
    assert torch.equal(reader.whole("parameters/0.weight"), values)
    rest = FlatShard(values.shape, 3, torch.empty(30))
    dcp.load({"parameters/0.weight": rest}, storage_reader=reader, planner=ShardLoadPlanner(), no_dist=True)
    assert torch.equal(rest.values, values.reshape(-1)[3:33])


def test_a_view_is_written_without_the_storage_around_it(tmp_path):
    storage = torch.randn(10**6)
    save(tmp_path / "tensors", {"parameters/0.weight": FlatShard([10], 0, storage[50:60])})
    assert sum(path.stat().st_size for path in (tmp_path / "tensors").iterdir()) < 10_000


@pytest.mark.parametrize(("name", "distance"), [("state.json", 3), (INDEX, 7), (METADATA, 13), ("__0_0.distcp", 61)])
def test_every_changed_bit_is_refused_or_changes_nothing(checkpoint, name, distance):
    path = checkpoint / name if name == "state.json" else tensors_folder(checkpoint) / name
    before = content(read_whole(checkpoint))
    for position in range(0, path.stat().st_size, distance):
        flip(path, position, position % 8)
        try:
            assert content(read_whole(checkpoint)) == before
            # The bit is in white space or in something that only other programs read.
            assert name in ("state.json", METADATA)
        except CheckpointError as error:
            assert f"{path}" in str(error) and "\n" not in str(error)
        if name != "state.json":
            with pytest.raises(CheckpointError, match=f"{name} is damaged: its checksum differs"):
                verify(checkpoint)
        flip(path, position, position % 8)
    verify(checkpoint)


@pytest.mark.parametrize("kept", [0, 1, 100, -1])
def test_a_file_that_was_cut_is_named(checkpoint, kept):
    path = items_file(checkpoint)
    path.write_bytes(path.read_bytes()[:kept])
    for read in (read_whole, verify):
        with pytest.raises(CheckpointError, match=f"{path.name} is damaged: its checksum differs; restore the"):
            read(checkpoint)


def test_a_missing_file_is_named(checkpoint):
    for path in (items_file(checkpoint), tensors_folder(checkpoint) / INDEX):
        path.rename(path.with_suffix(".away"))
        for read in (read_whole, verify):
            with pytest.raises(CheckpointError, match=f"{path.name} is missing; restore it"):
                read(checkpoint)
        path.with_suffix(".away").rename(path)
    (tensors_folder(checkpoint) / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=".metadata is missing"):
        verify(checkpoint)


def test_a_file_that_cannot_be_read_is_named(checkpoint):
    for path in (items_file(checkpoint), tensors_folder(checkpoint) / ".metadata", checkpoint / "state.json"):
        path.rename(path.with_suffix(".away"))
        path.mkdir()
        with pytest.raises(CheckpointError, match=f"{path.name} cannot be read .Is a directory.; restore it"):
            verify(checkpoint)
        path.rmdir()
        path.with_suffix(".away").rename(path)


@pytest.mark.parametrize(
    ("number", "kind", "advice"),
    [(errno.EIO, DamageError, "restore it"), (errno.EMFILE, CheckpointError, "let all ranks read it, and load again")],
)
def test_only_a_disk_that_has_lost_data_makes_an_older_checkpoint_take_its_place(
    checkpoint, monkeypatch, number, kind, advice
):
    def fail(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("ds_lgamp.checkpoint.storage.os", SimpleNamespace(fstat=fail))
    with pytest.raises(CheckpointError, match=f"distcp cannot be read .*{advice}") as raised:
        read_whole(checkpoint)
    assert type(raised.value) is kind


@pytest.mark.parametrize("left", [None, 100])
def test_a_file_that_is_not_there_for_the_first_rank_fails_the_save(tmp_path, monkeypatch, left):
    """As where every node has a disk of its own."""
    write_data = ChecksummedWriter.write_data

    def elsewhere(writer, plan, planner):
        written = write_data(writer, plan, planner)
        (path,) = Path(writer.path).glob("*.distcp")
        path.unlink() if left is None else os.truncate(path, left)
        return written

    monkeypatch.setattr(ChecksummedWriter, "write_data", elsewhere)
    with pytest.raises(CheckpointError, match="__0_0.distcp was written by another rank .* share a disk"):
        written(tmp_path / "run" / "tag")
    assert not (tmp_path / "run" / "tag").exists()


def test_bytes_that_nobody_wrote_are_found(checkpoint):
    path = items_file(checkpoint)
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(CheckpointError, match=f"{path.name} has bytes that belong to no tensor"):
        verify(checkpoint)


def test_a_checkpoint_can_be_moved(checkpoint, tmp_path):
    shutil.move(tmp_path / "run", tmp_path / "elsewhere")
    moved = tmp_path / "elsewhere" / "tag"
    verify(moved)
    assert content(read_whole(moved)) == content(example())
