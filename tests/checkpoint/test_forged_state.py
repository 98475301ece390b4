"""A forged state with correct checksums is refused in one sentence."""

import pytest

from ds_lgamp.checkpoint.files import CheckpointError
from ds_lgamp.checkpoint.schema import COUNTERS, PULLED
from ds_lgamp.checkpoint.whole import read_whole
from testing.checkpoints import forge_state, inside
from tests.checkpoint.forging import forge_text, refused, without

STATE_KEYS = (
    *(
        "versions",
        "layout",
        "layers",
        "parameters",
        "optimizer",
        "lr_scheduler",
        "loss_scaler",
        "counters",
        "micro_offset",
    ),
    *("data", "tensors", "index_checksum"),
)


@pytest.mark.parametrize("key", STATE_KEYS)
def test_a_state_without_a_key_is_refused(checkpoint, key):
    forge_state(checkpoint, without(key))
    refused(checkpoint, f"state.json is not what ds_lgamp writes ({key}: Field required)")


@pytest.mark.parametrize("key", STATE_KEYS)
@pytest.mark.parametrize("value", [[[]], "text", -1.5, {"a": {"b": 0}}], ids=repr)
def test_a_state_of_other_types_is_refused(checkpoint, key, value):
    forge_state(checkpoint, lambda state: state.update({key: value}))
    refused(checkpoint, f"state.json is not what ds_lgamp writes ({key}")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (inside("tensors", ".."), "tensors: "),
        (inside("tensors", "tensors-../../../secret"), "tensors: "),
        (inside("tensors", "/etc"), "tensors: "),
        (
            inside("parameters/0.weight", {"shape": [2**62, 2**62], "group": 0}),
            "lists 0.weight with shape [4611686018427",
        ),
        (inside("parameters/0.none", {"shape": [2**70, 0], "group": None}), "parameters.0.none.shape.0: "),
        (inside("parameters/0.none", {"shape": [2, 1], "group": None}), "it lists parameter 0.none, but has no tensor"),
        (inside("parameters/0.weight/group", -1), "parameters.0.weight.group: "),
        (inside("layout/data_ranks", 0), "layout.data_ranks: "),
        (inside("layout/data_type", "load"), "'load' is not a data type of this torch"),
        (inside("layers/tied", {"embed": [-1]}), "layers.tied.embed.0: "),
        (inside("data/micro_batches_per_epoch", 0), "data.micro_batches_per_epoch: "),
        (inside("counters/global_steps", "3"), "counters.global_steps: "),
        (inside("counters/global_steps", 10**30), "counters.global_steps: "),
        (inside("optimizer/scalars", []), "it has 1 parameter groups but scalars of 0"),
        (inside("optimizer/groups", [{"lr": {"type": "object"}}]), "it holds a value marked as 'object'"),
        (inside("optimizer/scalars", [{"step": {"type": "tensor"}}]), "it holds a value that cannot be decoded"),
        (inside("lr_scheduler/state", {"type": "tensor"}), "it holds a value that cannot be decoded"),
        (inside("loss_scaler", {"__class__": 0.0}), "loss_scaler.cur_scale: Field required"),
    ],
)
def test_an_odd_state_is_refused(checkpoint, change, words):
    forge_state(checkpoint, change)
    refused(checkpoint, words)


def test_a_state_nested_without_end_is_refused(checkpoint):
    (checkpoint / "state.json").write_text("[" * 10**6)
    with pytest.raises(CheckpointError, match="state.json is damaged"):
        read_whole(checkpoint)


@pytest.mark.parametrize(
    "text",
    [
        b"\xff\xfe",
        b"[" * 10**6,
        b"[]",
        b"{}",
        b'{"random": [], "client_state": {}}',
        b'{"random": {}, "client_state": {"type": "tensor"}}',
        b'{"random": {}, "client_state": {"type": "tuple", "value": []}}',
    ],
    ids=lambda text: repr(text[:60]),
)
def test_an_odd_text_of_a_rank_is_refused(checkpoint, text):
    forge_text(checkpoint, text)
    refused(checkpoint, "ranks/0-0 holds ")


def test_the_names_of_counters_belong_to_the_file_format():
    assert (*COUNTERS, PULLED) == (
        "global_steps",
        "global_samples",
        "skipped_steps",
        "micro_steps",
        "_pulled_of_training_data",
    )
