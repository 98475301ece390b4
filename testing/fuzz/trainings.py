"""Random models and loops of one's own: each training equals one plain process, or is refused in a sentence."""

import faulthandler
import gc
import json
import linecache
import os
import sys
import time
import traceback
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist

import ds_lgamp
from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.user_script import finish_engines
from ds_lgamp.partition.guard import NotGatheredError
from ds_lgamp.runtime.batch import ActionError
from testing.deepspeed_rank import prepare_rank, quiet
from testing.fuzz.outcome import Outcome, sentence_fault
from testing.fuzz.plain import Plain
from testing.fuzz.source import DEFAULTS, as_file, script
from testing.fuzz.ways import FAMILIES, WAYS

SCRIPT = "<training>"
"""What tracebacks call the script."""
LIMIT = 30
"""Seconds of one training."""
NEAR = 2e-5
"""How far numbers may be from those of the plain process, relative to the larger one."""


class Training(NamedTuple):
    """A model, a loop, and how they train."""

    ways: tuple[str, ...]
    source: str
    """The script."""
    pipeline_ranks: int
    data_ranks: int
    micro_batches: int
    """Of a rank and step."""
    optimizer: str
    config: dict[str, Any]

    @property
    def world_size(self) -> int:
        return self.pipeline_ranks * self.data_ranks

    @property
    def description(self) -> str:
        zero, block = self.config["zero_optimization"], self.config["ds_lgamp"]
        ranks = f"{self.pipeline_ranks} x {self.data_ranks} ranks"
        return f"{', '.join(self.ways)}; {ranks}, {self.micro_batches} micro-batches, {zero}, {block}, {self.optimizer}"

    @property
    def file(self) -> str:
        """The script as a file that a person can read and run."""
        return as_file(self.source, self.optimizer, self.config, self.world_size)


def of_case(case: int) -> Training:
    """Draws the training of a case, which its number decides alone."""
    random = Random(case)
    ways: list[str] = []
    for family in random.sample(FAMILIES, random.choice((1, 1, 1, 2, 2, 3))):
        way = random.choice(list(family))
        if not any(_collide(WAYS[way], WAYS[other]) for other in ways):
            ways.append(way)
    pipeline_ranks, data_ranks = random.choice(((1, 1), (1, 1), (1, 1), (2, 1), (2, 1), (1, 2)))
    pipeline_ranks = min([pipeline_ranks, *(int(WAYS[way].get("pipeline_ranks", 2)) for way in ways)])
    block: dict[str, Any] = {"pipeline_ranks": pipeline_ranks} if pipeline_ranks > 1 else {}
    block["recompute"] = random.choice(("full", "full", "none", "auto"))
    if block["recompute"] == "auto":
        # What fits of the small models differs between them.
        block["recompute_memory"] = random.choice(("200 kB", "1 MB", "1 GB"))
    block["schedule"] = random.choice(("layered", "layered", "layered", "interleaved_1f1b", "1f1b", "gpipe"))
    micro_batches = random.choice((1, 2, 2, 3, 4))
    if block["schedule"] == "layered":
        block["micro_batch_group"] = random.choice(("all", "all", 1, 2))
        block["overlap_update"] = random.random() < 0.2
    if block["schedule"] in ("1f1b", "gpipe"):
        block["chunks_per_rank"] = 1
    elif block["schedule"] == "interleaved_1f1b" or random.random() < 0.3:
        block["chunks_per_rank"] = random.choice((1, 2))
    # From a generator of its own, so that other draws of a case stay.
    rows = Random(f"rows of case {case}").choice(("auto", 1, 3, 7))
    if rows != "auto":
        block["loss_chunk"] = rows
    for way in ways:
        block |= json.loads(WAYS[way].get("config", "{}"))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": random.choice((0.0, 0.0, 0.0, 0.5)),
        "zero_optimization": {"stage": random.randint(0, 3)},
        "zero_allow_untested_optimizer": True,
        "ds_lgamp": block,
    }
    optimizer = random.choice(("SGD(trained, 0.1)", "SGD(trained, 0.1, momentum=0.5)", "AdamW(trained, 0.01, eps=0.1)"))
    if config["zero_optimization"] == {"stage": 3} and random.random() < 0.5:
        block |= {"regather": "host", "resident_chunks": random.choice((1, 2))}
    source = script([WAYS[way] for way in ways], micro_batches, random.randint(3, 5))
    if random.random() < 0.1 and not block.get("reproducible"):
        # Of any backend, this one takes the least time.
        block["compile"] = {"backend": "eager"}
    split = Random(f"parts of case {case}").choice((False, True, 1))
    if split and block["recompute"] != "auto" and not (block.get("compile") or block.get("reproducible")):
        block["split_backward"] = split
    return Training(tuple(ways), source, pipeline_ranks, data_ranks, micro_batches, optimizer, config)


def _collide(one: dict[str, str], other: dict[str, str]) -> bool:
    """Whether both fill a slot for one text."""
    both = DEFAULTS.keys() & one.keys() & other.keys()
    return any(not (one[slot].startswith("+") and other[slot].startswith("+")) for slot in both)


class Trained(NamedTuple):
    """What came of a training."""

    seen: dict[Any, float]
    """What the loop saw, such as losses."""
    state: dict[str, torch.Tensor]
    """The model's; empty on ranks that do not have it."""


def run_cases(cases: list[tuple[int, Training]], folder: str, limit: int) -> None:
    """Runs cases on a rank, one after another. Writes outcomes to a file of the rank in ``folder``, line by line.

    Ends the process if a case takes more than ``limit`` seconds, or unless all ranks surely came as far.
    """
    prepare_rank()
    ds_lgamp.install()
    rank = dist.get_rank()
    with (Path(folder) / f"rank{rank}").open("a") as said, (Path(folder) / f"stack{rank}").open("a") as stack:
        for case, training in cases:
            stack.truncate(0)
            print(json.dumps([time.time(), case, "begins", ""]), file=said, flush=True)
            faulthandler.dump_traceback_later(limit, exit=True, file=stack)
            outcome, alike = run_case(training)
            print(json.dumps([time.time(), case, *outcome]), file=said, flush=True)
            if not alike:
                os._exit(1)
            gc.collect()
            dist.barrier()
            faulthandler.cancel_dump_traceback_later()


def run_case(training: Training) -> tuple[Outcome, bool]:
    """Trains both ways. Returns what came of it, and whether all ranks surely came so far."""
    try:
        expected = train_alone(training)
    except Exception:
        return Outcome("fails alone", traceback.format_exc(limit=-4)), training.data_ranks == 1
    engines: list[Any] = []
    try:
        with quiet():
            outcome, alike = _compare(_trained(training, engines), expected), True
    except Exception as error:
        outcome = _failed(error, _may_end(training, expected))
        alone = training.world_size == 1
        alike = (alone or not engines) if isinstance(error, ConfigError) else (alone and not engines)
    if alike:
        with quiet():
            finish_engines()
            for engine in engines:
                engine.destroy()
    return outcome, alike


def _may_end(training: Training, expected: Trained) -> bool:
    """Whether an exception of the model itself, which the loop survives in a plain process, ends the training: on one
    rank in a call that trains, on several ranks in every call."""
    return any(key[0] == "failed" and (training.world_size > 1 or key[1] == "training") for key in expected.seen)


def _failed(error: Exception, may_end: bool) -> Outcome:
    """Returns a refusal if one of ds_lgamp's caused ``error``."""
    if may_end and isinstance(error, ActionError):
        return Outcome("ended by the model")
    refusal = _refusal(error)
    fault = type(error).__name__ if refusal is None else sentence_fault(str(refusal))
    return Outcome("refused", str(refusal)) if fault is None else Outcome(f"defect: {fault}", _traceback(error))


def _traceback(error: Exception) -> str:
    return "".join(traceback.format_exception(error, limit=-4))


def _refusal(error: BaseException | None) -> BaseException | None:
    """The refusal that caused ``error``, if one did."""
    while error is not None and not isinstance(error, (ConfigError, NotGatheredError)):
        error = error.__cause__ or error.__context__
    return error


def _run(training: Training) -> dict[str, Any]:
    """Runs the script anew, as a module, so that its classes can be pickled. Tracebacks and TorchScript find its
    lines."""
    module = sys.modules["training"] = ModuleType("training")
    linecache.cache[SCRIPT] = len(training.source), None, training.source.splitlines(keepends=True), SCRIPT
    exec(compile(training.source, SCRIPT, "exec"), vars(module))
    return vars(module)


def _optimizer(training: Training, model: Any) -> Any:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return eval(f"optim.{training.optimizer}", {"optim": torch.optim, "trained": trained})


def _trained(training: Training, engines: list[Any]) -> Trained:
    """Trains with an engine, which is added to ``engines``."""
    namespace = _run(training)
    model = namespace["make"]()
    optimizer = _optimizer(training, model)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=training.config)[0]
    engines.append(engine)
    engine.train()
    seen = namespace["train"](engine, model, [dist.get_rank()])
    return Trained(seen, engine.module.state_dict())


def train_alone(training: Training) -> Trained:
    """Trains without DeepSpeed."""
    namespace = _run(training)
    model = namespace["make"]()
    ranks = [dist.get_rank()] if training.data_ranks > 1 else list(range(training.pipeline_ranks))
    micro_batches = training.micro_batches * len(ranks)
    clipping = training.config["gradient_clipping"]
    engine = Plain(model, _optimizer(training, model), micro_batches, training.data_ranks, clipping)
    engine.train()
    seen = namespace["train"](engine, model, ranks)
    return Trained(seen, {name: value.detach().clone() for name, value in model.state_dict().items()})


def _compare(found: Trained, expected: Trained) -> Outcome:
    for key, value in found.seen.items():
        other = expected.seen[key]
        if not abs(value - other) <= NEAR * max(1.0, abs(value), abs(other)):
            return Outcome("defect: other numbers", f"at {key} {value:.7g} instead of {other:.7g}")
    if found.state and found.state.keys() != expected.state.keys():
        return Outcome("defect: another state", f"{sorted(found.state.keys() ^ expected.state.keys())}")
    for name, tensor in found.state.items():
        truth = expected.state[name]
        if tensor.shape != truth.shape or not torch.allclose(tensor.double(), truth.double(), NEAR, NEAR):
            few, others = tensor.flatten()[:3].tolist(), truth.flatten()[:3].tolist()
            return Outcome("defect: other values", f"{name} is {few} instead of {others}")
    return Outcome("equal")


def outcome_of(folder: Path, ranks: int, case: int, end: str) -> Outcome | None:
    """Reads what the ranks wrote of a case. None if it began on no rank.

    The outcome is that of the first rank that failed or was refused, since the other ranks then only miss it. If none
    was, but not all came to an end, the case has come to ``end``.
    """
    lines = [line for rank in range(ranks) for line in _lines(folder / f"rank{rank}") if line[1] == case]
    if not lines:
        return None
    others = [Outcome(kind, text) for _, _, kind, text in sorted(lines) if kind not in ("begins", "equal")]
    if others:
        return others[0]
    if sum(kind == "equal" for _, _, kind, _ in lines) == ranks:
        return Outcome("equal")
    stacks = [text for rank in range(ranks) for text in _text(folder / f"stack{rank}")]
    return Outcome("defect: hang", "\n".join(stacks)) if stacks else Outcome("defect: no end", end)


def _lines(file: Path) -> list[list[Any]]:
    return [json.loads(line) for text in _text(file) for line in text.splitlines()]


def _text(file: Path) -> list[str]:
    return [file.read_text()] if file.exists() and file.stat().st_size else []
