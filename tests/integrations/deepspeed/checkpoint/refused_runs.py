"""Saves and loads that are refused: the code of the ranks of test_checkpoint.py."""

from argparse import Namespace
from functools import partial
from pathlib import Path

import deepspeed
import pytest
import torch
import torch.distributed as dist

from ds_lgamp.checkpoint.files import CheckpointError
from ds_lgamp.config import ConfigError
from tests.integrations.deepspeed.checkpoint.resumed_runs import LAYOUTS, end_state, engine_of, seed_all, steps

LAYOUT = LAYOUTS["zero 3, stored activations"]


class WarmupLR:
    """Shares only its name with the checkpoint's scheduler."""

    def __init__(self):
        self.state = {"part": 1}

    def state_dict(self):
        return dict(self.state)

    def load_state_dict(self, state):
        self.state = {"part": 2}
        if "part" not in state:
            raise KeyError("part")
        self.state = dict(state)


def refusals(folder):
    """Returns the error of each impossible save or load. Checks that the engine then trains on unchanged."""
    said = {}
    engine, untouched = engine_of(*LAYOUT), engine_of(*LAYOUT)
    checkpoint, refused = str(Path(folder) / "zero 3, stored activations"), partial(_note_refusal, said)
    _load_into_other_runs(refused, engine, checkpoint)
    _save_and_load_wrongly(refused, engine, checkpoint, folder)
    seed_all(5)
    first = steps(engine, 1)
    seed_all(5)
    assert steps(untouched, 1) == first
    return said


def _note_refusal(said, name, kind, function, *arguments, **options):
    with pytest.raises(kind) as error:
        function(*arguments, **options)
    said[name] = str(error.value)


def _load_into_other_runs(refused, engine, checkpoint):
    wider = engine_of(3, {"layers_per_chunk": 1}, {}, width=8)
    refused("other shapes", CheckpointError, wider.load_checkpoint, checkpoint)
    for option in ("grouped", "scheduler", "other scheduler", "scheduler of that name"):
        other_engine = engine_of(*LAYOUT, grouped=option == "grouped", scheduler=option == "grouped")
        if option == "other scheduler":
            optimizer = other_engine.optimizer.optimizer
            other_engine.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        if option == "scheduler of that name":
            other_engine.lr_scheduler = WarmupLR()
        before = end_state(other_engine)
        refused(option, CheckpointError, other_engine.load_checkpoint, checkpoint)
        assert end_state(other_engine) == before and other_engine.global_steps == 0
    assert other_engine.lr_scheduler.state == {"part": 1}
    momentum = engine_of(*LAYOUT, optimizer={"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}})
    before = end_state(momentum)
    refused("optimizer", CheckpointError, momentum.load_checkpoint, checkpoint)
    refused("optimizer state", CheckpointError, momentum.optimizer.load_state_dict, engine.optimizer.state_dict())
    assert end_state(momentum) == before


def _save_and_load_wrongly(refused, engine, checkpoint, folder):
    other, first_rank = str(Path(folder) / "other"), dist.get_rank() == 0
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        refused("block", ConfigError, engine.load_checkpoint, checkpoint)
    called = engine_of(*LAYOUT)
    called.optimizer.param_groups[0]["name"] = print
    refused("option", CheckpointError, called.save_checkpoint, other)
    called = engine_of(*LAYOUT)
    steps(called, 1)
    for state in called.optimizer.optimizer.state.values():
        state["called"] = print
    refused("option of state", CheckpointError, called.save_checkpoint, other)
    for tag in ("", "..", "/absolute"):
        refused(f"tag {tag}", CheckpointError, engine.save_checkpoint, other, tag=tag)
    refused("no such tag", CheckpointError, engine.load_checkpoint, folder, tag="global_step99")
    for tag in ("one", "two"):
        engine.save_checkpoint(folder, tag=tag, client_state={"tag": tag}, save_latest=False)
    refused("tag of its own", CheckpointError, engine.load_checkpoint, folder, tag="one" if first_rank else "two")
    refused("load function", ConfigError, engine.load_checkpoint, folder, custom_load_fn=print)
    refused("client state", CheckpointError, engine.save_checkpoint, other, client_state={"here": print})
    refused("no dictionary", CheckpointError, engine.save_checkpoint, other, client_state=Namespace(epoch=3))
    if first_rank:
        (Path(folder) / "file").write_text("")
    dist.barrier()
    refused("no folder", CheckpointError, engine.save_checkpoint, str(Path(folder) / "file"))
    assert not Path(other).exists()
    assert engine.load_checkpoint(other) == (None, None)
