"""Makes a small checkpoint, and damages or forges its files."""

import json
from pathlib import Path

import torch

from ds_lgamp.checkpoint.files import checksum_of
from ds_lgamp.checkpoint.values import encode
from ds_lgamp.checkpoint.whole import WholeCheckpoint, write_whole


def example() -> WholeCheckpoint:
    """Returns a checkpoint with a frozen bf16 parameter, a parameter without elements, and a scalar parameter."""
    torch.manual_seed(0)
    parameters = {
        "tied_modules.embed.weight": torch.randn(7, 4),
        "0.weight": torch.randn(3, 4, 5),
        "0.none": torch.zeros(0, 2),
        "1.gain": torch.randn(()),
        "10.weight": torch.randn(6).bfloat16(),
    }
    trained = {name: tensor for name, tensor in parameters.items() if tensor.numel() and name != "10.weight"}
    state = {
        "versions": {"ds_lgamp": "0.1.0", "torch": "2.13.0", "deepspeed": "0.19.8"},
        "layout": {
            "pipeline_ranks": 2,
            "data_ranks": 4,
            "tensor_ranks": 1,
            "zero_stage": 3,
            "schedule": "layered",
            "chunk_bounds": [0, 1, 2, 11],
            "placement": [0, 1, 0],
            "data_type": "bfloat16",
        },
        "layers": {
            "types": ["Linear", "BatchNorm1d", "Embedding", *["identity"] * 7, "Linear"],
            "tied": {"embed": [2]},
            "partition_method": "uniform",
            "extra_states": [],
        },
        "parameters": {
            name: {"shape": list(tensor.shape), "group": 0 if name in trained else None}
            for name, tensor in parameters.items()
        },
        "optimizer": {
            "class": "AdamW",
            "groups": [{"lr": 0.1, "betas": (0.9, 0.95), "fused": None}],
            "scalars": [{"step": torch.tensor(3.0)}],
        },
        "lr_scheduler": {"class": "LambdaLR", "state": {"last_epoch": 3}},
        "loss_scaler": None,
        "counters": {
            "global_steps": 3,
            "global_samples": 96,
            "skipped_steps": 0,
            "micro_steps": 24,
            "_pulled_of_training_data": 24,
        },
        "micro_offset": 24,
        "data": {"micro_batches_per_epoch": 10, "samples": 8},
    }
    return WholeCheckpoint(
        parameters,
        buffers={"1.mean": torch.randn(4), "1.seen": torch.tensor(5)},
        moments={
            key: {name: torch.rand(tensor.shape) for name, tensor in trained.items()} for key in ("exp_avg", "square")
        },
        state=state,
        client_state={"epoch": (3, "three")},
    )


def written(folder: Path) -> Path:
    """Writes the example as the checkpoint ``folder``."""
    write_whole(folder, example())
    return folder


def tensors_folder(checkpoint: Path) -> Path:
    (folder,) = checkpoint.glob("tensors-*")
    return folder


def items_file(checkpoint: Path) -> Path:
    """Returns the single file that holds all tensors of the example."""
    (path,) = tensors_folder(checkpoint).glob("*.distcp")
    return path


def flip(path: Path, position: int, bit: int) -> None:
    """Flips one bit of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def flip_in(checkpoint: Path, name: str) -> None:
    """Flips a bit of the tensor ``name``."""
    index = json.loads((tensors_folder(checkpoint) / "index.json").read_text())
    (part,) = index["tensors"][name]["parts"]
    flip(items_file(checkpoint), part[3] + part[4] // 2, 3)


def forge_state(checkpoint: Path, change) -> None:
    """Applies ``change`` to state.json and corrects its checksum."""
    path = checkpoint / "state.json"
    state = json.loads(path.read_text())
    del state["checksum"]
    state = _changed(state, change)
    path.write_text(json.dumps({"checksum": checksum_of(json.dumps(state).encode()), **state}))


def inside(path, value):
    """Makes a change that sets the entry at ``path`` of state.json to ``value``. ``path`` is keys separated by
    slashes."""

    def change(state):
        *outer, last = path.split("/")
        for key in outer:
            state = state[key]
        state[last] = value

    return change


def forge_index(checkpoint: Path, change) -> None:
    """Applies ``change`` to index.json and corrects all checksums that depend on it."""
    path = tensors_folder(checkpoint) / "index.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps(_changed(index, change)))
    forge_state(checkpoint, lambda state: state.update(index_checksum=checksum_of(path.read_bytes())))


def forge_metadata(checkpoint: Path, data: bytes) -> None:
    """Writes ``data`` as DCP's own index and corrects all checksums that depend on it."""
    (tensors_folder(checkpoint) / ".metadata").write_bytes(data)
    forge_index(checkpoint, lambda index: index.update(metadata_checksum=checksum_of(data)))


def _changed(value, change):
    """Returns the result of ``change``, or ``value`` if it was changed in place."""
    result = change(value)
    return value if result is None else result


def forge_item(checkpoint: Path, name: str, data: bytes) -> None:
    """Replaces the tensor ``name`` by ``data`` and corrects all checksums that depend on it."""
    path = items_file(checkpoint)
    before = path.read_bytes()

    def replace(index):
        after = b""
        for key, entry in index["tensors"].items():
            (part,) = entry["parts"]
            item = data if key == name else before[part[3] : part[3] + part[4]]
            part[3:] = [len(after), len(item), checksum_of(item)]
            after += item
        path.write_bytes(after)

    forge_index(checkpoint, replace)


def content(whole: WholeCheckpoint) -> str:
    """Returns the whole content as bits, except the names of files."""
    state = {key: value for key, value in whole.state.items() if key not in ("format", "tensors", "index_checksum")}
    return json.dumps(encode(whole._replace(state=state)), sort_keys=True)
