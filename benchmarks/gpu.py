"""Compares GPTs on one accelerator: tokens per second, model flop utilisation and peak memory, with plain torch and
DeepSpeed as peers.

Every contender trains every size in its own process. If one fails or runs out of memory, its failure is recorded and
all other results stay. The record is written after each process. All processes together take at most ``SECONDS``.
"""

import json
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator

from benchmarks.gpt.contenders import BASELINE, CONTENDERS, Contender, Training
from benchmarks.gpt.process import free_memory, prepare_process, start_hosts
from benchmarks.gpt.sizes import LARGE, PEAK_FLOPS, SIZES, TINY, GptSize
from benchmarks.record import OURS, Failure, Record, begin, finish, write_json
from ds_lgamp.integrations.user_script import finish_engines
from testing.ranks import run_on_ranks

NAME, NOT_RUN = "gpu", "not run"
SECONDS = 450
"""For all contenders together. What is not run in this time is recorded among the failures, as not run."""
PROCESS_SECONDS = 100
"""For one contender at one size."""
WARM_UP, STEPS = 2, 5
LOSS_TOLERANCE = 1e-3
"""Relative. Order and data type of bf16 gradient sums make a smaller difference."""
SLOWEST = 0.98
"""Lowest share of plain torch's tokens per second, at the same recomputation."""

Runs = dict[str, dict[str, Any]]
"""Measurements of one process, by name of the trial: ``failure``, ``not run`` or ``losses`` of all steps, ``seconds``
of counted steps, ``peak`` and ``reserved`` bytes, number of ``parameters``, and name of the ``device``."""


class Trial(NamedTuple):
    """What one training of a process trains, and for how many counted steps."""

    size: GptSize
    recompute: str
    steps: int = STEPS


def run(size: str | None = None, trace: Path | None = None) -> Record:
    """Measures all sizes or one.

    Args:
        size: a key of ``SIZES``; None for all but the tiny one. Only a run of all sizes is saved.
        trace: folder for Chrome traces of one ds_lgamp step at each size.

    Raises SystemExit without an accelerator, unless the size is the tiny one.
    """
    if get_accelerator().device_name() == "cpu" and size != TINY:
        raise SystemExit(
            f"no accelerator is there; use a machine with one, or try it out on the CPU with --size {TINY}"
        )
    for record in records([size] if size else LARGE, trace):
        if size is None:
            finish(record)
    return record


def records(sizes: Sequence[str], trace: Path | None = None) -> Iterator[Record]:
    """Measures ``sizes``. Yields the record after each contender at each size, and at last with its targets."""
    record = begin(NAME)
    record.machine["megatron-core"] = version("megatron-core")
    deadline = time.monotonic() + SECONDS
    for name in sizes:
        runs: dict[str, Runs] = {}
        for contender in CONTENDERS:
            runs[contender.name] = measure(contender, SIZES[name], deadline, _trace_file(trace, contender, name))
            enter(record, name, contender.name, runs[contender.name], _expected_losses(runs))
            yield record
    aim(record)
    yield record


def measure(contender: Contender, size: GptSize, deadline: float, trace: Path | None) -> Runs:
    """Trains a size with each recomputation, by which the results are named."""
    trials = {kind: Trial(size, kind) for kind in (*size.recompute, *contender.also)}
    return measure_trials(contender, trials, deadline, trace)


def measure_trials(
    contender: Contender,
    trials: Mapping[str, Trial],
    deadline: float,
    trace: Path | None = None,
    limit: float = PROCESS_SECONDS,
) -> Runs:
    """Trains one trial after another in a process of its own. Keeps the results measured before a failure.

    Args:
        contender: who trains.
        trials: what, by name.
        deadline: when the time for all contenders is over, of ``time.monotonic``.
        trace: file for a Chrome trace of a step of the first trial; None for none.
        limit: seconds for this process.
    """
    left = deadline - time.monotonic()
    seconds = min(limit, left)
    too_late = {NOT_RUN: f"the {SECONDS} s for all contenders were over"}
    ended = too_late
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "runs.json"
        if seconds > 0:
            started = time.monotonic()
            try:
                run_on_ranks(
                    *(1, _measure_on_device, contender, trials, results, trace),
                    seconds=seconds,
                    before_init=prepare_process,
                    backend=get_accelerator().communication_backend_name(),
                )
            except AssertionError as error:
                ended = {"failure": str(error).strip().splitlines()[-1]}
                if time.monotonic() - started >= seconds:
                    ended = too_late if left < limit else {"failure": f"stopped after {seconds:.0f} s"}
        found: Runs = json.loads(results.read_text()) if results.exists() else {}
    return {name: found.get(name, ended) for name in trials}


def _measure_on_device(contender: Contender, trials: Mapping[str, Trial], results: Path, trace: Path | None) -> None:
    start_hosts()
    runs: Runs = {}
    for name, trial in trials.items():
        try:
            before = get_accelerator().memory_allocated()
            device = torch.device(get_accelerator().current_device_name())
            training = contender.build(trial.size, trial.recompute, device)
            runs[name] = _measure_run(training, before, trial.steps)
            write_json(results, runs)
            if trace is not None and name == next(iter(trials)):
                write_trace(training, trace)
            # An update that still runs on the host would hold the engine's memory beside the next training.
            finish_engines()
        except Exception as error:
            traceback.print_exc()
            message = str(error).strip().splitlines() or [""]
            # A run that was measured and could not be traced has failed, too.
            runs.setdefault(name, {})["failure"] = f"{type(error).__name__}: {message[0]}"
            write_json(results, runs)
        # By now the exception above no longer holds the frames of the failed engine.
        training = None
        free_memory()


def _measure_run(training: Training, memory_before: int, steps: int) -> dict[str, Any]:
    accelerator = get_accelerator()
    device = torch.device(accelerator.current_device_name())
    losses, seconds = [], []
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            accelerator.reset_peak_memory_stats()
        accelerator.synchronize()
        start = time.perf_counter()
        loss = training.step()
        accelerator.synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(float(loss))
    return {
        "losses": losses,
        "seconds": seconds[WARM_UP:],
        "peak": None if device.type == "cpu" else accelerator.max_memory_allocated() - memory_before,
        # What allocators took from the device, idle memory of pools included.
        "reserved": None if device.type == "cpu" else accelerator.max_memory_reserved(),
        "parameters": training.parameters,
        "device": device_name(device),
    }


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def write_trace(training: Training, path: Path) -> None:
    """Profiles one more step."""
    with torch.profiler.profile(activities=torch.profiler.supported_activities()) as profile:
        training.step()
        get_accelerator().synchronize()
    path.parent.mkdir(parents=True, exist_ok=True)
    profile.export_chrome_trace(str(path))


def _trace_file(folder: Path | None, contender: Contender, size: str) -> Path | None:
    """Path of the trace for one contender. All ZeRO stages of ds_lgamp do the same on one device, so one trace is
    enough."""
    traced = folder is not None and contender.name == f"{OURS}, ZeRO-3"
    return folder / f"{size}.json.gz" if folder is not None and traced else None


def _expected_losses(runs: dict[str, Runs]) -> list[float] | None:
    """Losses of the first run of a size that did not fail. Plain torch runs first."""
    losses = (measured["losses"] for kinds in runs.values() for measured in kinds.values() if "losses" in measured)
    return next(losses, None)


def enter(record: Record, name: str, contender: str, runs: Runs, expected: list[float] | None) -> None:
    """Enters the measured runs as rows. Enters a run that failed or has other losses as a failure."""
    size = SIZES[name]
    for kind, measured in runs.items():
        config = size.config(name, kind)
        if NOT_RUN in measured:
            record.fail(contender, config, f"{NOT_RUN}: {measured[NOT_RUN]}")
            continue
        failure = measured.get("failure") or deviation(measured["losses"], expected or [])
        if failure:
            record.fail(contender, config, failure)
            continue
        device, peak = measured["device"], measured["peak"]
        record.machine["accelerator"] = device
        config["parameters"] = measured["parameters"]
        rates = [size.tokens / seconds for seconds in measured["seconds"]]
        record.add(contender, config, "tokens per second", rates, "tokens/s")
        if device in PEAK_FLOPS:
            shares = [size.model_flops / seconds / PEAK_FLOPS[device] for seconds in measured["seconds"]]
            record.add(contender, config, "model flop utilisation", shares, "of peak")
        if peak is not None:
            record.add(contender, config, "peak memory", [peak], "bytes")
            record.add(contender, config, "peak reserved memory", [measured["reserved"]], "bytes")
        record.add(contender, config, f"loss of step {len(measured['losses'])}", measured["losses"][-1:], "nats")


def deviation(losses: list[float], expected: list[float], tolerance: float = LOSS_TOLERANCE) -> str | None:
    """Describes the first loss that differs from the expected one; None if none does."""
    for step, (loss, right) in enumerate(zip(losses, expected, strict=True), 1):
        if not abs(loss - right) <= tolerance * right:
            return f"computes something else: loss {loss:.6g} in step {step}, the others have {right:.6g}"
    return None


def failures_of_ours(record: Record) -> list[Failure]:
    """Returns the runs of ds_lgamp that failed, or for which no time was left."""
    return [failure for failure in record.failures if failure.contender.startswith(OURS)]


def aim(record: Record) -> None:
    """Compares ds_lgamp with plain torch at the same recomputation."""
    rates = {
        (row.contender, row.config["size"], row.config["recompute"]): row.median
        for row in record.rows
        if row.metric == "tokens per second"
    }
    for (contender, size, recompute), rate in rates.items():
        if contender.startswith(OURS) and (BASELINE, size, recompute) in rates:
            text = f"tokens per second of {BASELINE} / of {contender}, {size}, recompute {recompute}"
            record.aim(text, rates[BASELINE, size, recompute] / rate, 1 / SLOWEST)
    failed = [failure for failure in failures_of_ours(record) if not failure.reason.startswith(NOT_RUN)]
    record.aim(f"runs of {OURS} that failed", len(failed), 0)
