"""DeepSpeed's monitors and log lines report a run, with measured waits."""

import contextlib
import csv
import io
import logging
import os
import time

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

import ds_lgamp
from ds_lgamp.runtime.clocks import EXPOSED_WAITS
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks

STEPS = 3
PAUSE = 0.03
"""Seconds that each forward of the last layer takes at least. The previous rank waits meanwhile."""
EVENTS = {
    "train_loss",
    "lr",
    "grad_norm",
    "tokens_per_second",
    "bubble",
    "peak_bytes",
    *(f"exposed_wait_seconds_{kind}" for kind in EXPOSED_WAITS),
}


class Slow(nn.Linear):
    def forward(self, inputs):
        time.sleep(PAUSE)
        return super().forward(inputs)


def token_loss(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batches(engine):
    generator = torch.Generator().manual_seed(engine.grid.data_parallel_id)
    return iter([(torch.randint(0, 9, (2, 5), generator=generator),) * 2 for _ in range(4)])


def train(folder):
    """Trains with all monitors. Returns losses, norm, seconds, printed text, log lines, and what was measured of
    an evaluation."""
    prepare_rank()
    os.chdir(folder)
    os.environ["WANDB_MODE"] = "offline"
    import wandb

    ds_lgamp.install()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "steps_per_print": 1,
        "wall_clock_breakdown": True,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_type": "linear"}},
        "ds_lgamp": {"layers_per_chunk": 1, "trace": f"{folder}/trace", "trace_steps": "2:2"},
    }
    if dist.get_rank() == 0:
        # Many scripts configure monitors on the first rank only.
        config["csv_monitor"] = {"enabled": True, "output_path": folder, "job_name": "csv"}
        config["tensorboard"] = {"enabled": True, "output_path": folder, "job_name": "tensorboard"}
        config["wandb"] = {"enabled": True, "project": "test"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        layers = [LayerSpec(nn.Embedding, 9, 6), LayerSpec(nn.Linear, 6, 6), LayerSpec(Slow, 6, 9)]
        module = PipelineModule(layers, num_stages=2, loss_fn=token_loss, partition_method="uniform")
        engine = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)[0]
        # Adds a handler, because DeepSpeed's logger keeps the output of its creation.
        lines = io.StringIO()
        deepspeed.utils.logging.logger.addHandler(logging.StreamHandler(lines))
        deepspeed.utils.logging.logger.setLevel("INFO")
        losses, seconds = [], []
        for _ in range(STEPS):
            start = time.perf_counter()
            losses.append(engine.train_batch(batches(engine)).item())
            seconds.append(time.perf_counter() - start)
        engine.eval_batch(batches(engine))
        evaluated = engine.lgamp._stopwatch.read()
        norm = float(engine.get_global_grad_norm())
        if engine.global_rank == 0:
            # A test's rank has no interpreter exit, at which wandb would finish by itself.
            wandb.finish()
    return losses, norm, seconds, printed.getvalue(), lines.getvalue(), evaluated


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("monitors")


@pytest.fixture(scope="module")
def run(folder):
    return run_on_ranks(4, train, str(folder))[0]


@pytest.fixture(scope="module")
def recorded(folder, run):
    """Returns the values of every CSV file by the event's name."""
    values = {}
    for path in (folder / "csv").iterdir():
        with path.open() as file:
            rows = list(csv.reader(file))
        assert len({step for step, _ in rows}) == len(rows), f"{path.stem} is written more than once a step"
        values[path.stem.removeprefix("Train_Samples_")] = {int(step): float(value) for step, value in rows[1:]}
    return values


def test_all_events_are_written_at_every_step(run, recorded):
    assert recorded.keys() == EVENTS | {"eval_loss"}
    for name in EVENTS:
        assert list(recorded[name]) == [16, 32, 48], name


def test_loss_rate_and_norm_are_the_engines(run, recorded):
    losses, norm, *_ = run
    assert list(recorded["train_loss"].values()) == pytest.approx(losses)
    assert recorded["grad_norm"][48] == pytest.approx(norm)
    assert list(recorded["lr"].values()) == pytest.approx([0.1 / 3, 0.2 / 3, 0.1], abs=0.04)


@pytest.mark.timing
def test_tokens_are_those_of_all_data_parallel_ranks(run, recorded):
    """Two ranks, four micro-batches, two rows of five tokens."""
    _, _, seconds, *_ = run
    for rate, duration in zip(recorded["tokens_per_second"].values(), seconds):
        assert 0.5 * 80 / duration < rate < 2 * 80 / duration


@pytest.mark.timing
def test_waits_are_measured_where_they_are(run, recorded):
    """Pipeline rank 1 has chunk 1 only. Its first backward waits until rank 0 has finished the slow forwards of chunk 2
    and one backward of it. The mean over the ranks is half of that."""
    _, _, seconds, *_ = run
    for step, duration in zip((32, 48), seconds[1:]):
        waits = {kind: recorded[f"exposed_wait_seconds_{kind}"][step] for kind in EXPOSED_WAITS}
        assert waits["gradient"] > 3 * PAUSE / 2
        assert 0 < sum(waits.values()) < duration
        assert all(wait >= 0 for wait in waits.values())
    assert recorded["peak_bytes"][48] > 1e7, "the CPU reports the resident set"


@pytest.mark.timing
def test_the_bubble_is_what_waits_for_neighbours_and_the_host_leave(run, recorded):
    """Each of the four micro-batches of a slow layer lets the other rank wait."""
    _, _, seconds, *_ = run
    for step, duration in zip((32, 48), seconds[1:]):
        waits = sum(recorded[f"exposed_wait_seconds_{kind}"][step] for kind in ("activation", "gradient", "send"))
        assert waits / duration < recorded["bubble"][step] < 1 - 4 * PAUSE / 2 / duration


def test_tensorboard_and_wandb_get_the_same(folder, run, recorded):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    scalars = [(event.step, event.value) for event in events.Scalars("Train/Samples/exposed_wait_seconds/gradient")]
    assert dict(scalars) == pytest.approx(recorded["exposed_wait_seconds_gradient"])
    (binary,) = folder.glob("wandb/offline-run-*/*.wandb")
    content = binary.read_bytes()
    for name in ("train_loss", "tokens_per_second", "exposed_wait_seconds/gather", "peak_bytes"):
        assert f"Train/Samples/{name}".encode() in content


def test_steps_are_printed_and_broken_down(run):
    losses, _, _, printed, logged, _ = run
    for step, loss in enumerate(losses, 1):
        assert f"steps: {step} loss: {loss:0.4f} iter time (s):" in printed
    breakdowns = [line for line in logged.splitlines() if "time (ms) | train_batch:" in line]
    assert len(breakdowns) == STEPS
    assert all(f"wait for {kind}:" in breakdowns[0] for kind in EXPOSED_WAITS) and "forward:" in breakdowns[0]


def test_evaluations_are_not_measured(run):
    assert set(run[-1].values()) == {0.0}
