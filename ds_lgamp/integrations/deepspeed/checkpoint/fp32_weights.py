"""What DeepSpeed's ``zero_to_fp32`` makes of checkpoints, for those of this package: the whole weights in fp32."""

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from deepspeed.utils import zero_to_fp32

from ds_lgamp.checkpoint import folder as folders
from ds_lgamp.checkpoint.files import write_synced
from ds_lgamp.checkpoint.storage import VerifyingReader
from ds_lgamp.checkpoint.whole import Planned, planned_of
from ds_lgamp.integrations.hosts import replace_attribute

SCRIPT = "zero_to_fp32.py"
"""What DeepSpeed calls its script in a folder of checkpoints."""
_CONTENT = f'''"""Writes the weights of a checkpoint in this folder in fp32: python {SCRIPT} CHECKPOINT_DIR OUTPUT_DIR

It has the options and the output of DeepSpeed's script of this name, and needs ds_lgamp, which wrote the checkpoint.
"""

from {__name__} import convert

if __name__ == "__main__":
    convert()
'''
_STOCK = "_get_fp32_state_dict_from_zero_checkpoint"


class _Stored(NamedTuple):
    """A tensor in a checkpoint, as DeepSpeed's functions take one that is not read yet."""

    planned: Planned
    reader: VerifyingReader

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.planned.shape)

    @property
    def dtype(self) -> torch.dtype:
        casts = self.planned.dtype.is_floating_point and not self.planned.packed
        return torch.float32 if casts else self.planned.dtype

    def contiguous(self) -> torch.Tensor:
        """Reads the tensor. Raises CheckpointError if it is damaged."""
        key = self.planned.key
        # A checkpoint does not store tensors without elements.
        return torch.empty(self.shape, dtype=self.dtype) if key is None else self.reader.whole(key).to(self.dtype)


def serve_zero_to_fp32(undo: ExitStack) -> None:
    """Lets the functions of ``deepspeed.utils.zero_to_fp32`` read checkpoints of this package, too, until ``undo`` is
    closed."""
    replace_attribute(zero_to_fp32, _STOCK, partial(_weights, getattr(zero_to_fp32, _STOCK)), undo)


def _weights(stock: Callable[..., Any], checkpoint: str, exclude_frozen_parameters: bool) -> Any:
    """Returns the tensors of the folder ``checkpoint`` by the names of the model that was trained."""
    folder = Path(checkpoint)
    if not (folder / folders.STATE).exists():
        return stock(checkpoint, exclude_frozen_parameters)
    state, reader = folders.open_checkpoint(folder)
    parameters = state["parameters"]
    tensors = {
        planned.name: _Stored(planned, reader)
        for planned in planned_of(state, reader, torch.float32)
        if not (exclude_frozen_parameters and parameters.get(planned.own_name, {"group": 0})["group"] is None)
    }
    others = state["layers"].get("other_names", {}).items()
    return tensors | {name: tensors[inside] for name, inside in others if inside in tensors}


def put_script(directory: Path) -> None:
    """Puts the script beside the checkpoints in ``directory``. It takes the place of DeepSpeed's, whose checkpoints it
    reads, too."""
    path = directory / SCRIPT
    if not path.exists() or path.read_text(errors="replace") != _CONTENT:
        write_synced(path, _CONTENT)


def convert() -> None:
    """Does what DeepSpeed's script does, with the arguments of the command line."""
    parser = argparse.ArgumentParser(prog=SCRIPT, description=_CONTENT.split('"""')[1])
    parser.add_argument("checkpoint_dir", help="the folder with the checkpoints")
    parser.add_argument("output_dir", help="where to write pytorch_model.bin")
    parser.add_argument("--max_shard_size", default="5GB", help="the size of the largest file to write")
    parser.add_argument("--safe_serialization", action="store_true", help="write model.safetensors instead")
    parser.add_argument("-t", "--tag", help="the checkpoint; by default the one that the file 'latest' names")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out what does not train")
    parser.add_argument("-d", "--debug", action="store_true", help="has no effect")
    options = vars(parser.parse_args())
    del options["debug"]
    with ExitStack() as undo:
        serve_zero_to_fp32(undo)
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(**options)
