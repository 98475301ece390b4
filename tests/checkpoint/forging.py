"""Forged checkpoints and an attack, shared by the tests of forged files."""

import io
import pickle
from pathlib import Path

import pytest
import torch

from ds_lgamp.checkpoint.files import CheckpointError
from ds_lgamp.checkpoint.whole import read_whole, verify
from testing.checkpoints import forge_index, forge_item

WEIGHT = "parameters/0.weight"


class Attack:
    """Writes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self):
        return exec, (f"open({self.marker!r}, 'w').close()",)


def refused(checkpoint, words):
    for read in (read_whole, verify):
        with pytest.raises(CheckpointError) as error:
            read(checkpoint)
        said = str(error.value)
        assert words in said and "do not trust this checkpoint" in said and "\n" not in said


def saved(content, pickled=False):
    data = io.BytesIO()
    pickle.dump(content, data) if pickled else torch.save(content, data)
    return data.getvalue()


def of_weight(**changes):
    return lambda index: index["tensors"][WEIGHT].update(changes)


def part_of_weight(position, value):
    def change(index):
        index["tensors"][WEIGHT]["parts"][0][position] = value

    return change


def without(key):
    return lambda content: {name: value for name, value in content.items() if name != key}


def forge_text(checkpoint, text):
    """Makes ``text`` the record of the first rank."""
    values = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    forge_index(checkpoint, lambda index: index["tensors"]["ranks/0-0"].update(shape=[len(text)]))
    forge_index(checkpoint, lambda index: index["tensors"]["ranks/0-0"]["parts"][0].__setitem__(1, [len(text)]))
    forge_item(checkpoint, "ranks/0-0", saved(values))
