"""Runs that keep live states, die and go on: the code of the ranks of test_live.py."""

import itertools
import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

import ds_lgamp
from ds_lgamp.checkpoint.live_states import _slots_in
from ds_lgamp.checkpoint.slot import Slot
from testing.deepspeed_rank import prepare_rank, quiet
from tests.integrations.deepspeed.linear import mean_square, whole_state

DATA = list(zip(torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.zeros(40, 6)))
"""An epoch ends in the fourth or fifth step."""
FURTHER = 3
"""Steps after the restart."""


class Case(NamedTuple):
    """How a run on two ranks trains."""

    stage: int
    pipeline_ranks: int = 1
    bf16: bool = False
    block: dict = {}
    more: dict = {}
    """More of ds_config.json."""
    zero: dict = {}


ON_HOST = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
CLIPPED = {"gradient_clipping": 0.1}
CASES = {
    "zero 0": Case(0),
    "zero 1, two pipeline ranks": Case(1, pipeline_ranks=2),
    "zero 2, bf16": Case(2, bf16=True),
    "zero 3": Case(3),
    "zero 3, LAMB": Case(3, more={"optimizer": {"type": "Lamb", "params": {"lr": 0.01}}}),
    "updates behind reductions": Case(3, bf16=True, block={"overlap_update": True}),
    "updates in the next step": Case(2, block={"overlap_update": True}, more=CLIPPED),
    "updates on the host": Case(3, bf16=True, zero=ON_HOST),
    "updates on the host, in the next step": Case(1, 2, zero={"offload_optimizer": {"device": "cpu"}}, more=CLIPPED),
}


class Run:
    """A run of ``case`` with random numbers of its own, so that runs may take turns in a process.

    Args:
        live: the folder of its live states; None without.
    """

    def __init__(self, case: Case, live: Path | None = None, block: dict | None = None) -> None:
        torch.manual_seed(3 + dist.get_rank())
        ds_lgamp.install()
        frozen = LayerSpec(nn.Linear, 8, 8)
        norm = nn.LayerNorm if case.bf16 else nn.BatchNorm1d
        layers = [LayerSpec(nn.Linear, 6, 8), LayerSpec(nn.Dropout, 0.2), LayerSpec(norm, 8), frozen]
        layers += [LayerSpec(nn.Linear, 8, 8), LayerSpec(nn.Linear, 8, 6)]
        block = {"layers_per_chunk": 1, **case.block, **(block or {})}
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": case.stage, **case.zero},
            "bf16": {"enabled": case.bf16},
            "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_type": "linear"}},
            **case.more,
            "ds_lgamp": block if live is None else {**block, "live_checkpoint": str(live)},
        }
        data = [(inputs.bfloat16(), targets) for inputs, targets in DATA] if case.bf16 else DATA
        with quiet():
            module = PipelineModule(layers, num_stages=case.pipeline_ranks, loss_fn=_loss)
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(not name.startswith("3."))
            trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
            self.engine = deepspeed.initialize(
                model=module, model_parameters=trained, training_data=data, config=config
            )[0]
        self._random = torch.get_rng_state()

    def step(self) -> float:
        torch.set_rng_state(self._random)
        loss = self.engine.train_batch().item()
        self._random = torch.get_rng_state()
        return loss

    def load(self, folder: Path, **options) -> int:
        """Loads what there is. Returns the step."""
        self.engine.load_checkpoint(str(folder), **options)
        self._random = torch.get_rng_state()
        return self.engine.global_steps

    def trained(self, until: int) -> tuple[list[float], dict]:
        """Returns the losses of the steps up to ``until``, and the weights then."""
        losses = [self.step() for _ in range(self.engine.global_steps, until)]
        return losses, {name: value.tolist() for name, value in whole_state(self.engine.module).items()}


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return mean_square(output.float(), target)


def train_until_killed(folder: Path, cases: dict[str, Case], done) -> None:
    """Trains all runs in turns. ``done`` is the number of steps that all have made."""
    prepare_rank()
    runs = [Run(case, folder / name / "live") for name, case in cases.items()]
    for step in itertools.count(1):
        for run in runs:
            run.step()
        done.value = step


def resume(folder: Path, cases: dict[str, Case]) -> dict:
    """Returns for every run in which step it goes on, and what it then shows of itself beside one that was never
    killed."""
    prepare_rank()
    found = {}
    for name, case in cases.items():
        run, whole = Run(case, folder / name / "live"), Run(case)
        begun = run.load(folder / name / "checkpoints")
        whole.trained(begun)
        found[name] = begun, run.trained(begun + FURTHER), whole.trained(begun + FURTHER)
    return found


TORN = 4
"""The step whose state one rank does not get whole."""


def die_while_writing(folder: Path) -> None:
    """Rank 0 dies while it writes its state of step ``TORN``, when rank 1 has got its own."""
    prepare_rank()
    live = folder / "live"
    run = Run(CASES["zero 3"], live)
    write, blobs = Slot.write, []

    def dying(slot, *arguments):
        if run.engine.global_steps >= TORN - 1 and len(blobs) > 2:
            while not any(seen.step == TORN and seen.rank == 1 for seen in _slots_in(live, 0)):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        blobs.extend([slot] if run.engine.global_steps >= TORN - 1 else [])
        return write(slot, *arguments)

    if dist.get_rank() == 0:
        Slot.write = dying
    while True:
        run.step()
