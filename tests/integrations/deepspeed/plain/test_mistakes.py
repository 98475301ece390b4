"""Mistakes in calls of the engine are named on every rank, and what would be lost is refused."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BatchEncoding
from transformers.activations import ACT2FN

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.deepspeed.plain.unfinished_batch import ModelSettings, UnfinishedBatch
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.plain import mistakes
from tests.integrations.deepspeed.plain.training import MICRO_BATCHES


def test_mistakes_are_named_on_every_rank():
    errors, others = run_on_ranks(2, mistakes.faults, 2)
    for what, words in {
        "plain module": "write it as a PipelineModule or an nn.Sequential",
        "without a loss": "the last module of the nn.Sequential is Linear, which returns no loss; set ds_lgamp.outputs",
        "too many ranks": "ds_lgamp.pipeline_ranks is 2, but the model has 1 layers; use at most as many",
        "indivisible": "ds_lgamp.pipeline_ranks is 3, which does not divide the 2 ranks",
        "unlike replicas": "ds_lgamp.data_rank_speeds is [2.0, 1.0], but a script that calls engine(...) gives every",
        "unlike models": "the tensor 3.linear.weight of the model is absent on rank 0 and torch.float32 of shape "
        "[6, 6] on rank 1; build the same model on all ranks",
        "shared memory": "1.linear.weight and 4.linear.weight share memory, but are two tensors",
        "no loss": "set ds_lgamp.outputs to 'all' if the script computes the loss, or append a module that does",
        "second engine": "the Sequential has an engine already, which a ds_lgamp block cannot replace",
        "named": "engine(...) got inputs, but an nn.Sequential takes no named arguments",
        "uneven": "rank 0 trains on 1 micro-batches for one step, but rank 1 trains on 2 micro-batches",
        "factors": "the losses of one batch were multiplied by factors from 0.5 to 1",
        "factors of a rank": "losses multiplied by 0.5, but rank 1 calls engine.step() with losses multiplied by "
        "factors from 0.5 to 1",
        "no number": "a loss of the batch was multiplied by NaN or infinity",
        "infinity on a rank": "losses multiplied by 0.5, but rank 1 calls engine.step() with a loss multiplied by NaN",
        "shared count": "several layers share the buffer 'calls' of a Counter, and a forward changes it",
        "never a step": "engine(...) is called again after 2 micro-batches without engine.step(); call engine.backward",
        "no step": "engine(...) is called after a complete batch; call engine.backward and engine.step after every",
        "no backward": "engine.step() is called before every loss of the batch went through engine.backward(loss)",
        "nothing to step": "engine.step() is called, but no engine(...) since the last step",
        "step alone": "rank 0 trains on 1 micro-batches for one step, but rank 1 trains on 0 micro-batches",
        "state in a step": "rank 0 reads the state of the whole model (state_dict, save_pretrained, save_16bit_model), "
        "but rank 1 calls engine.step() with losses multiplied by 0.5",
        "in evaluation": "engine.backward(loss) is called with a loss that has no gradient, as in evaluation",
        "ended": "rank 0 ended its script, but rank 1 trains on 1 micro-batches for one step",
    }.items():
        assert words in errors[what]
        assert words in others[what]


def test_a_script_that_catches_what_a_batch_raised_learns_that_it_cannot_go_on():
    (errors,) = run_on_ranks(1, mistakes.go_on_after_a_failure)
    assert "failed at F0.0 (call 0 of rank 0)" in errors.pop("batch")
    for what, error in errors.items():
        assert error.startswith("an earlier batch failed, and its communication cannot be undone; restart"), what


def test_an_evaluation_that_fails_on_a_single_rank_raises_what_its_layer_raised_and_training_goes_on():
    [(kind, losses)] = run_on_ranks(1, mistakes.evaluate_badly, True)
    [(_, plain)] = run_on_ranks(1, mistakes.evaluate_badly, False)
    evaluated = [losses.pop(place) for place in (0, MICRO_BATCHES)]
    assert kind == "RuntimeError"
    assert losses == plain and all(map(math.isfinite, evaluated))


def test_what_would_be_lost_is_refused_on_every_rank():
    errors, others = run_on_ranks(2, mistakes.lose_work, 2)
    for what, words in {
        "batch size": "train_batch_size is 6, but 2 ranks with micro-batches of 2 make multiples of 4; use one of them",
        "no batch": "train_batch_size is 0",
        **{
            f"zero_grad of the {what}": "zero_grad() is called after 1 micro-batches of a batch"
            for what in ("engine", "optimizer", "model")
        },
        "gradient of inputs": "an argument of engine(...) requires a gradient, which ds_lgamp.pipeline_ranks 2 would",
        "reused tensor": "micro-batch 0 of 2 was changed after engine(...) got it",
        **{
            what: "the modes or frozen parameters of the model were changed after micro-batch 0 of 2 was given"
            for what in ("mode", "frozen")
        },
        **{
            f"own term {last}": ".linear.weight has a gradient that does not come from a loss of engine(...)"
            for last in range(MICRO_BATCHES)
        },
    }.items():
        assert words in errors[what]
        assert words in others[what]


class Scaled(nn.Linear):
    given, scale = None, 1.0


def test_changes_between_calls_are_found_after_a_forward_has_deleted_an_attribute():
    model = Scaled(2, 2)
    model.given, model.scale = 3, 1.0
    settings = ModelSettings(model)
    settings.begin()
    del model.given
    assert settings.changed() == "'given' of the model was"
    settings.remember()
    assert settings.changed() is None
    model.scale = 2.0
    assert settings.changed() == "'scale' of the model was"
    settings.remember()
    model.weight.requires_grad_(False)
    assert settings.changed() == "the modes or frozen parameters of the model were"


class Given:
    __slots__ = ("rate",)


def test_changes_are_found_after_a_script_has_deleted_what_no_dictionary_holds():
    given = Given()
    given.rate = 3.0

    class Rated(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs) * given.rate

    settings = ModelSettings(Rated(2, 2))
    settings.begin()
    assert settings.changed() is None
    del given.rate
    assert settings.changed() == "'rate' of the model was"
    given.rate = 3.0
    assert settings.changed() is None


class Held:
    """A class of the script's own, whose attribute may hold anything."""

    def __init__(self, rate: Any) -> None:
        self.rate = rate


def _in_slots(rate: Any) -> Given:
    given = Given()
    given.rate = rate
    return given


LONG = 100
"""Elements of a tensor too large to compare because it is small."""
CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "memory of NumPy": (lambda: np.zeros(LONG), torch.from_numpy),
    "memory of NumPy that holds no number": (lambda: np.full(LONG, np.nan), torch.from_numpy),
    "a part of a tensor": (lambda: torch.zeros(2, LONG), lambda tensor: tensor[:, ::2]),
    "few numbers": (lambda: torch.zeros(()), lambda tensor: tensor.data),
    "an array": (lambda: np.zeros(LONG), lambda array: array),
    "an array in an object": (lambda: np.zeros(LONG), Held),
    "a tensor in an object": (lambda: torch.zeros(LONG), Held),
    "a tensor in features": (lambda: torch.zeros(LONG), lambda tensor: BatchEncoding({"rate": tensor})),
    "a list in an object": (lambda: [0.0], Held),
    "an array in slots": (lambda: np.zeros(LONG), _in_slots),
}
"""What a script may change after a call, and how it has given that."""


@pytest.mark.parametrize("change", CHANGES)
def test_what_lies_in_arguments_must_stay_as_it_is_until_the_batch_is_complete(change):
    make, give = CHANGES[change]
    held, batch = make(), UnfinishedBatch(nn.Linear(2, 2))
    batch.add(((give(held),), {}))
    batch.check()
    held[0 if isinstance(held, list) else ...] = 1.0
    with pytest.raises(ConfigError, match="micro-batch 0 of 1 was changed after engine"):
        batch.check()


def test_a_script_may_write_beside_the_parts_of_tensors_that_it_has_given():
    whole, batch = torch.zeros(2, LONG), UnfinishedBatch(nn.Linear(2, 2))
    for row in whole:
        row.fill_(1.0)
        batch.add(((row,), {"given": _in_slots(row)}))
    batch.check()


def test_a_dictionary_that_makes_its_values_anew_counts_as_it_is():
    class Activated(nn.Linear):
        def forward(self, inputs):
            return ACT2FN["silu"](super().forward(inputs))

    settings = ModelSettings(Activated(2, 2))
    settings.begin()
    assert settings.changed() is None
