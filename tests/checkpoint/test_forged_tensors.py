"""Forged tensors or a forged index with correct checksums are refused in one sentence, and no code in them runs."""

import pickle

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from ds_lgamp.checkpoint.files import CheckpointError
from ds_lgamp.checkpoint.whole import read_whole, verify
from testing.checkpoints import content, example, forge_index, forge_item, forge_metadata, items_file, tensors_folder
from tests.checkpoint.forging import WEIGHT, Attack, of_weight, part_of_weight, refused, saved, without


def test_the_attack_of_these_tests_is_one(tmp_path):
    pickle.loads(pickle.dumps(Attack(tmp_path / "marker")))
    assert (tmp_path / "marker").exists()


def test_code_in_the_index_of_dcp_does_not_run(checkpoint, marker):
    """Only other programs read this index, so the checkpoint still loads unchanged."""
    forge_metadata(checkpoint, pickle.dumps(Attack(marker)))
    verify(checkpoint)
    assert content(read_whole(checkpoint)) == content(example())


def test_bytes_in_the_index_of_dcp_are_not_unpickled(checkpoint, marker):
    """The forged index makes the weight a pickled object, which DCP's own reader would unpickle."""
    metadata = FileSystemReader(tensors_folder(checkpoint)).read_metadata()
    metadata.state_dict_metadata[WEIGHT] = BytesStorageMetadata()
    forge_metadata(checkpoint, pickle.dumps(metadata))
    forge_item(checkpoint, WEIGHT, saved(Attack(marker)))
    refused(checkpoint, f"{items_file(checkpoint)} holds no tensor for {WEIGHT}")


@pytest.mark.parametrize("pickled", [False, True])
def test_code_in_the_place_of_a_tensor_does_not_run(checkpoint, marker, pickled):
    forge_item(checkpoint, WEIGHT, saved(Attack(marker), pickled))
    refused(checkpoint, f"{items_file(checkpoint)} holds no tensor for {WEIGHT}")


def test_code_beside_the_numbers_of_a_tensor_does_not_run(checkpoint, marker):
    """Only the numbers are read."""
    forge_item(checkpoint, WEIGHT, saved([torch.ones(3, 4, 5), Attack(marker)]))
    assert read_whole(checkpoint).parameters["0.weight"].eq(1).all()


@pytest.mark.parametrize(
    "item",
    [
        torch.zeros(3, 4, 5).double(),
        torch.zeros(3, 4),
        torch.zeros(3, 4, 6),
        torch.ones(3, 4, 5).to_sparse(),
        torch.zeros(3, 4, 5, device="meta"),
        "text",
    ],
    ids=["type", "dimensions", "shape", "sparse", "meta", "text"],
)
def test_another_item_in_the_place_of_a_tensor_is_refused(checkpoint, item):
    forge_item(checkpoint, WEIGHT, saved(item))
    refused(checkpoint, f"for {WEIGHT}")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\x03\x04",
        bytes(1000),
        b"archive/data/0" + bytes(240) + b"PK",
        b"\xff\xffarchive/data/0" + bytes(1000),
        b"\0\0archive/data/0" + bytes(239) + b"PK",
        saved(torch.zeros(3, 4, 5), pickled=True),
    ],
    ids=["empty", "cut", "zeros", "short", "odd length", "length of nothing", "pickled"],
)
def test_bytes_in_the_place_of_a_tensor_are_refused(checkpoint, data):
    forge_item(checkpoint, WEIGHT, data)
    refused(checkpoint, f"holds no tensor for {WEIGHT}")


def overlapping_halves(index):
    """Lists columns 0 and 1 of 4 twice and the others not at all."""
    _, _, *rest = index["tensors"][WEIGHT]["parts"][0]
    index["tensors"][WEIGHT]["parts"] = [[[0, column, 0], [3, 2, 5], *rest] for column in (0, 0)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda index: [], "Input should be an object"),
        (without("tensors"), "tensors: Field required"),
        (lambda index: index.update(tensors=[]), "tensors: "),
        (lambda index: index.update(code="x"), "code: Extra inputs"),
        (of_weight(dtype="load"), "'load' is not a data type of this torch"),
        (of_weight(dtype=3), "dtype: "),
        (of_weight(shape=[2**40, 2**20]), "a part lies outside"),
        (of_weight(shape=[2**70]), "shape.0: "),
        (of_weight(shape=[1] * 10**4), "shape: "),
        (of_weight(shape=[-3, -4, 5]), "shape.0: "),
        (of_weight(shape=[3.0, 4, 5]), "shape.0: "),
        (of_weight(shape=[3, 4, 6]), "its parts have 60 elements of 72"),
        (of_weight(shape=[4, 4, 5]), "its parts have 60 elements of 80"),
        (of_weight(parts=[]), "its parts have 0 elements"),
        (of_weight(shape=[0], parts=[]), "its parts have 0 elements of 0"),
        (of_weight(parts=[["a"]]), "parts.0"),
        (part_of_weight(0, [1, 0, 0]), "a part lies outside"),
        (part_of_weight(1, [3, 2, 5]), "its parts have 30 elements of 60"),
        (part_of_weight(1, [3, 0, 5]), "a part lies outside"),
        (overlapping_halves, "its parts overlap"),
        (part_of_weight(2, "../../secret.distcp"), "parts.0.2: "),
        (part_of_weight(2, "/etc/passwd"), "parts.0.2: "),
        (part_of_weight(2, "a\0.distcp"), "parts.0.2: "),
        (part_of_weight(3, -1), "parts.0.3: "),
        (part_of_weight(4, "all"), "parts.0.4: "),
        (
            lambda index: index["tensors"].update(evil=index["tensors"][WEIGHT]),
            "it has evil, which belongs",
        ),
        (
            lambda index: index["tensors"].update({"ranks/0-1": index["tensors"][WEIGHT]}),
            "it has ranks/0-1, which",
        ),
        (lambda index: index["tensors"].pop(WEIGHT) and None, "it lists parameter 0.weight, but has no tensor of it"),
        (
            lambda index: index["tensors"].update({"parameters/9.weight": index["tensors"][WEIGHT]}),
            "it does not list 9.weight, but has parameters/9.weight with shape [3, 4, 5]",
        ),
        (
            lambda index: index["tensors"].update({"optimizer/9.weight": index["tensors"][WEIGHT]}),
            "it does not list optimizer/9.weight, but has optimizer/9.weight with shape [3, 4, 5]",
        ),
    ],
)
def test_an_odd_index_is_refused(checkpoint, change, words):
    forge_index(checkpoint, change)
    refused(checkpoint, words)


@pytest.mark.parametrize(("position", "value"), [(3, 2**60), (4, 2**60), (4, 10**6), (5, 16 * "0")])
def test_bytes_that_are_not_there_are_refused(checkpoint, position, value):
    forge_index(checkpoint, part_of_weight(position, value))
    with pytest.raises(CheckpointError, match="__0_0.distcp is damaged"):
        read_whole(checkpoint)


def test_a_file_elsewhere_is_not_followed(checkpoint, tmp_path):
    """A link counts as damaged unless it leads to the written bytes."""
    (tmp_path / "secret").write_bytes(b"secret")
    items_file(checkpoint).unlink()
    (tensors_folder(checkpoint) / "__0_0.distcp").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="__0_0.distcp is damaged"):
        read_whole(checkpoint)
