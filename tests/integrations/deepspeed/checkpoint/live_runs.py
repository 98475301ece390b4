"""Runs that keep live states, die and go on: the code of the ranks of test_live.py."""

import itertools
import logging
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

import ds_lgamp
from ds_lgamp.checkpoint import live_recovery
from ds_lgamp.checkpoint.files import CheckpointError
from ds_lgamp.checkpoint.live_slot import Header, LiveSlot, read_header
from ds_lgamp.config import ConfigError
from testing.deepspeed_rank import prepare_rank, quiet
from testing.ranks import shared_number, started_ranks
from tests.integrations.deepspeed.linear import mean_square, whole_state

DATA = list(zip(torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.zeros(40, 6)))
"""An epoch ends in the fourth or fifth step."""
HIDDEN = 12
"""Width of hidden layers: shards begin in the middle of a row, and hold weights and biases."""
FURTHER = 3
"""Steps after the restart."""
SECONDS = 120


def kill_all(ranks: int, steps: int, function, *arguments, done=None) -> int:
    """Lets ranks call ``function(*arguments, done)``, and kills all of them at a random time after ``done`` has counted
    ``steps`` more. Returns how many it has counted."""
    done = shared_number() if done is None else done
    target = done.value + steps
    with started_ranks(ranks, function, *arguments, done) as (processes, results):
        deadline = time.monotonic() + SECONDS
        while done.value < target:
            assert all(process.is_alive() for process in processes), results.get()
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(random.uniform(0, 0.2))
        for process in processes:
            process.kill()
    return done.value


@contextmanager
def heard(logger: logging.Logger):
    """Collects what ``logger`` says."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)


class Case(NamedTuple):
    """How a run trains."""

    stage: int
    pipeline_ranks: int = 1
    bf16: bool = False
    block: dict = {}
    more: dict = {}
    """More of ds_config.json."""
    zero: dict = {}
    tied: bool = False
    """Whether the first and the last layer share their weights."""
    ranks: int = 2


ON_HOST = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
CLIPPED = {"gradient_clipping": 0.1}
MUON = {"muon_lr": 0.01, "adam_lr": 0.01, "momentum": 0.9, "ns_method": "standard"}
CASES = {
    "zero 0": Case(0),
    "zero 1, two pipeline ranks": Case(1, pipeline_ranks=2),
    "zero 2, bf16": Case(2, bf16=True),
    "zero 3": Case(3),
    "zero 3, two pipeline ranks, tied": Case(3, pipeline_ranks=2, tied=True),
    "zero 3, Muon": Case(3, more={"optimizer": {"type": "Muon", "params": MUON}}),
    "zero 3, LAMB": Case(3, more={"optimizer": {"type": "Lamb", "params": {"lr": 0.01}}}),
    "updates behind reductions": Case(3, bf16=True, block={"overlap_update": True}),
    "updates in the next step": Case(2, block={"overlap_update": True}, more=CLIPPED),
    "updates on the host": Case(3, bf16=True, zero=ON_HOST),
    "updates on the host, in the next step": Case(1, 2, zero={"offload_optimizer": {"device": "cpu"}}, more=CLIPPED),
    "shards that nodes keep": Case(3, zero={"zero_hpz_partition_size": 2}, ranks=4),
    "shards of each node, tied": Case(3, zero={"mics_shard_size": 2}, tied=True, ranks=4),
}


class Run:
    """A run of ``case`` with random numbers of its own, so that runs may take turns in a process.

    Args:
        live: the folder of its live states; None without.
    """

    def __init__(self, case: Case, live: Path | None = None, block: dict | None = None) -> None:
        torch.manual_seed(3 + dist.get_rank())
        ds_lgamp.install()
        square = LayerSpec(nn.Linear, HIDDEN, HIDDEN)
        norm = nn.LayerNorm if case.bf16 else nn.BatchNorm1d
        first, last = LayerSpec(nn.Linear, 6, HIDDEN), LayerSpec(nn.Linear, HIDDEN, 6)
        if case.tied:
            first = TiedLayerSpec("ends", nn.Linear, 6, HIDDEN)
            last = TiedLayerSpec("ends", nn.Linear, 6, HIDDEN, forward_fn=_transposed)
        # The fourth is frozen.
        layers = [first, LayerSpec(nn.Dropout, 0.2), LayerSpec(norm, HIDDEN), square, square, last]
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
        return losses, _weights(self)


def _weights(run: Run) -> dict:
    return {name: value.tolist() for name, value in whole_state(run.engine.module).items()}


def _transposed(layer: nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    return inputs @ layer.weight


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
    open_slot, write, opened, written = LiveSlot.open, LiveSlot.write, [], []

    def opening(slot):
        opened.append(slot)
        open_slot(slot)

    def dying(slot, *arguments):
        written.append(len(opened))
        if written.count(TORN) == 3:
            while not any(header.step == TORN and header.rank == 1 for _, header in headers_in(live)):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return write(slot, *arguments)

    if dist.get_rank() == 0:
        LiveSlot.open, LiveSlot.write = opening, dying
    while True:
        run.step()


def headers_in(live: Path) -> Iterator[tuple[Path, Header]]:
    """Yields the headers of states, also of runs that go on, which may replace them meanwhile."""
    for path in live.glob("live-*/*.json"):
        with suppress(CheckpointError):
            yield path, read_header(path)


def _refusal(live: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        Run(CASES["zero 3"], live)
    return str(refused.value)


class Loaded(NamedTuple):
    """What a run has after load_checkpoint."""

    step: int
    tag: str | None
    client_state: dict | None
    said: list[str]


class Choices:
    """Loads in a fresh run, from copies of live states and checkpoints.

    Args:
        folder: has ``live`` and ``checkpoints``. Runs load from the latter, which is restored each time.
    """

    def __init__(self, folder: Path) -> None:
        self.live, self.checkpoints, self._saved = folder / "live", folder / "checkpoints", folder / "saved"
        self._copy = folder / "copy"
        self._on_first_rank(lambda: shutil.copytree(self.checkpoints, self._saved))

    def load(self, *damage: Path, checkpoints: Path | None = None, **options) -> Loaded:
        """Returns what is loaded when a byte of some files, named relative to ``live``, is another."""
        self._on_first_rank(lambda: self._prepare(damage))
        run = Run(CASES["zero 3"], self._copy)
        with heard(live_recovery.logger) as said:
            path, client_state = run.engine.load_checkpoint(str(checkpoints or self.checkpoints), **options)
        run.engine.destroy()
        return Loaded(run.engine.global_steps, path and Path(path).name, client_state, said)

    def slot(self, rank: int, step: int, suffix: str) -> Path:
        (found,) = (path for path, header in headers_in(self.live) if (header.rank, header.step) == (rank, step))
        return found.relative_to(self.live).with_suffix(suffix)

    def _prepare(self, damage: tuple[Path, ...]) -> None:
        for source, target in ((self.live, self._copy), (self._saved, self.checkpoints)):
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(source, target)
        for path in damage:
            content = bytearray((self._copy / path).read_bytes())
            content[0] ^= 1
            (self._copy / path).write_bytes(content)

    @staticmethod
    def _on_first_rank(act) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            act()
        dist.barrier()


def choose(folder: Path, torn: Path) -> dict:
    """Returns what runs load where live states are torn, damaged, old, or those of others."""
    prepare_rank()
    run = Run(CASES["zero 3"], folder / "live")
    run.load(folder / "checkpoints")
    for step in (1, 2, 3, 4):
        run.engine.live_client_state["seen"] = step, dist.get_rank()
        run.step()
        if step == 2:
            run.engine.save_checkpoint(str(folder / "checkpoints"))
    run.engine.wait_for_checkpoint()
    run.engine.finish_gathers()
    choices, weights = Choices(folder), _weights(run)
    numbers, header = choices.slot(1, 4, ".bin"), choices.slot(0, 4, ".json")
    found = {
        "weights": weights,
        "no folder": _refusal(folder / "checkpoints" / "latest"),
        "whole": choices.load(),
        "damaged numbers": choices.load(numbers),
        "damaged header": choices.load(header),
        "all damaged": choices.load(numbers, choices.slot(0, 3, ".json")),
        "tag": choices.load(tag="global_step2"),
        "weights only": choices.load(load_module_only=True),
        "other checkpoints": choices.load(checkpoints=folder / "others"),
    }
    found["torn"] = Run(CASES["zero 3"], torn / "live").load(torn / "checkpoints")
    run.engine.save_checkpoint(str(folder / "checkpoints"))
    run.engine.wait_for_checkpoint()
    shutil.rmtree(folder / "saved", ignore_errors=True)
    found["old"] = Choices(folder).load()
    run.step()
    loaded = run.load(folder / "checkpoints")
    # Each rank drops its own.
    dist.barrier()
    found["own"] = loaded, len(list(headers_in(folder / "live")))
    return found


def go_on_alone(folder: Path) -> tuple:
    """Returns the step at which one rank goes on, and what it then shows of itself."""
    prepare_rank()
    run = Run(CASES["zero 3"], folder / "copy")
    begun = run.load(folder / "checkpoints")
    return begun, _weights(run)


REPEATED = Case(3, 2, bf16=True)
"""On four ranks."""


def go_on_until_killed(folder: Path, done) -> None:
    """Goes on from the last state. The first rank writes every step and its loss to a file."""
    prepare_rank()
    run = Run(REPEATED, folder / "live")
    run.load(folder / "checkpoints")
    while True:
        loss = run.step()
        if dist.get_rank() == 0:
            with open(folder / "losses", "a") as file:
                file.write(f"{run.engine.global_steps} {loss!r}\n")
            done.value = run.engine.global_steps


def losses(steps: int) -> list[float]:
    prepare_rank()
    return Run(REPEATED).trained(steps)[0]
