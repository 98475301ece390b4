"""Random models and loops of one's own: each training equals one plain process, or is refused in a sentence."""

import faulthandler
import gc
import json
import linecache
import os
import traceback
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist

import ds_lgamp
from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.deepspeed.engine.ending import finish_engines
from testing.deepspeed_rank import prepare_rank, quiet
from testing.fuzz.outcome import Outcome, sentence_fault
from testing.fuzz.plain import Plain
from testing.fuzz.source import DEFAULTS, script
from testing.fuzz.ways import FAMILIES, WAYS

LIMIT = 30
"""Seconds of one training."""
NEAR = 2e-5
"""How far numbers may be from those of the plain process, relative to the larger one."""


class Training(NamedTuple):
    """A model, a loop, and how they train."""

    ways: tuple[str, ...]
    count: int
    """Blocks."""
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
    def source(self) -> str:
        return script([WAYS[way] for way in self.ways], self.micro_batches, self.count)


def of_case(case: int) -> Training:
    """Draws the training of a case, which its number decides alone."""
    random = Random(case)
    ways: list[str] = []
    for family in random.sample(FAMILIES, random.choice((1, 1, 1, 2, 2, 3))):
        way = random.choice(list(family))
        if not any(_collide(WAYS[way], WAYS[other]) for other in ways):
            ways.append(way)
    pipeline_ranks, data_ranks = random.choice(((1, 1), (1, 1), (1, 1), (2, 1), (2, 1), (1, 2)))
    block: dict[str, Any] = {"pipeline_ranks": pipeline_ranks} if pipeline_ranks > 1 else {}
    block["recompute"] = random.choice(("full", "full", "none"))
    block["schedule"] = random.choice(("layered", "layered", "layered", "interleaved_1f1b", "1f1b", "gpipe"))
    micro_batches = random.choice((1, 2, 2, 3, 4))
    if block["schedule"] == "layered":
        block["micro_batch_group"] = random.choice(("all", "all", 1, 2))
        block["overlap_update"] = random.random() < 0.2
    if block["schedule"] in ("1f1b", "gpipe"):
        block["chunks_per_rank"] = 1
    elif block["schedule"] == "interleaved_1f1b" or random.random() < 0.3:
        block["chunks_per_rank"] = random.choice((1, 2))
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
    return Training(tuple(ways), random.randint(3, 5), pipeline_ranks, data_ranks, micro_batches, optimizer, config)


def _collide(one: dict[str, str], other: dict[str, str]) -> bool:
    """Whether both fill a slot for one text."""
    both = DEFAULTS.keys() & one.keys() & other.keys()
    return any(not (one[slot].startswith("+") and other[slot].startswith("+")) for slot in both)


def run_cases(cases: list[tuple[int, Training]], folder: str) -> None:
    """Runs cases on a rank, one after another. Writes outcomes to a file of the rank in ``folder``, line by line.

    Ends the process if a case takes too long, or fails otherwise than by a refusal that all ranks get.
    """
    prepare_rank()
    ds_lgamp.install()
    rank = dist.get_rank()
    with (Path(folder) / f"rank{rank}").open("a") as said, (Path(folder) / f"stack{rank}").open("a") as stack:
        for case, training in cases:
            stack.truncate(0)
            print(json.dumps([case, "begins", ""]), file=said, flush=True)
            faulthandler.dump_traceback_later(LIMIT, exit=True, file=stack)
            outcome, alike = run_case(training)
            print(json.dumps([case, *outcome]), file=said, flush=True)
            if not alike:
                os._exit(1)
            gc.collect()
            dist.barrier()
            faulthandler.cancel_dump_traceback_later()


def run_case(training: Training) -> tuple[Outcome, bool]:
    """Trains both ways. Returns what came of it, and whether all ranks surely came so far."""
    try:
        expected = _plain(training)
    except Exception:
        return Outcome("fails alone", traceback.format_exc(limit=-4)), training.data_ranks == 1
    engines: list[Any] = []
    try:
        with quiet():
            outcome, alike = _compare(_trained(training, engines), expected), True
    except Exception as error:
        outcome = _failed(error)
        alike = isinstance(error, ConfigError) and (not engines or training.world_size == 1)
    if alike:
        with quiet():
            finish_engines()
            for engine in engines:
                engine.destroy()
    return outcome, alike


def _failed(error: Exception) -> Outcome:
    """Returns a refusal if one of ds_lgamp's caused ``error``."""
    refusal = _refusal(error)
    fault = type(error).__name__ if refusal is None else sentence_fault(str(refusal))
    return Outcome("refused", str(refusal)) if fault is None else Outcome(f"defect: {fault}", _traceback(error))


def _traceback(error: Exception) -> str:
    return "".join(traceback.format_exception(error, limit=-4))


def _refusal(error: BaseException | None) -> BaseException | None:
    """The refusal that caused ``error``, if one did."""
    while error is not None and not isinstance(error, ConfigError):
        error = error.__cause__ or error.__context__
    return error


def _run(training: Training) -> dict[str, Any]:
    """Runs the script anew. Its lines are found by tracebacks and TorchScript."""
    name = f"<training {_run.__name__}>"
    linecache.cache[name] = len(training.source), None, training.source.splitlines(keepends=True), name
    namespace: dict[str, Any] = {"__name__": "training"}
    exec(compile(training.source, name, "exec"), namespace)
    return namespace


def _optimizer(training: Training, model: Any) -> Any:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return eval(f"optim.{training.optimizer}", {"optim": torch.optim, "trained": trained})


class Trained(NamedTuple):
    """What came of a training."""

    seen: dict[Any, float]
    """What the loop saw, such as losses."""
    state: dict[str, torch.Tensor]
    """The model's; empty on ranks that do not have it."""


def _trained(training: Training, engines: list[Any]) -> Trained:
    """Trains with an engine, which is added to ``engines``."""
    namespace = _run(training)
    model = namespace["make"]()
    optimizer = _optimizer(training, model)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=training.config)[0]
    engines.append(engine)
    engine.train()
    seen = namespace["train"](engine, model, [dist.getdist.get_rank()])
    return Trained(seen, engine.module.state_dict())


def _plain(training: Training) -> Trained:
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
            few, those = tensor.flatten()[:3].tolist(), truth.flatten()[:3].tolist()
            return Outcome("defect: other values", f"{name} is {few} instead of {those}")
    return Outcome("equal")


def outcomes(folder: Path, rank: int, end: str) -> dict[int, Outcome]:
    """Reads what a rank wrote: its outcomes by case. One that began only has come to ``end``."""
    file, stack = folder / f"rank{rank}", folder / f"stack{rank}"
    read: dict[int, Outcome] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        case, kind, text = json.loads(line)
        read[case] = Outcome(kind, text)
    dumped = stack.read_text() if stack.exists() else ""
    return {
        case: Outcome("defect: hang", dumped) if kind == "begins" and dumped else Outcome(kind, text or end)
        for case, (kind, text) in read.items()
    }


def worst(outcomes: list[Outcome]) -> Outcome:
    """Returns the outcome of a case on all ranks. A rank that fails leaves others behind, which then only began."""
    order = ("defect: other", "defect", "refused", "begins", "equal")
    found = min(
        outcomes, key=lambda outcome: next(place for place, kind in enumerate(order) if outcome.kind.startswith(kind))
    )
    return Outcome("defect: no end", found.text) if found.kind == "begins" else found
