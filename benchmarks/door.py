"""Trains a Llama of transformers by one unedited script with stock DeepSpeed and with a block: ``python -m benchmarks
run door``.

The script calls ``engine(**batch)``, ``engine.backward(loss)`` and ``engine.step()``. Every rank feeds its own
micro-batches. The first part counts gathers, reductions and bytes, and times the same steps on loopback and over a slow
network. The counts are exact on any machine.

The second part compares the script with a ``PipelineModule`` of the same layers, written by hand and trained by
``train_batch``. Both take turns in one set of processes. A model with almost no compute shows the time of the host.
"""

from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

from benchmarks.communication import Moved, moved
from benchmarks.contenders import Contender, Layout
from benchmarks.contenders.door import ByHand, Script, reference
from benchmarks.contenders.formula import program_of
from benchmarks.counting import Counted, count
from benchmarks.model import ModelSize
from benchmarks.record import OURS, REPETITIONS, Config, Record, begin
from benchmarks.training import LOOPBACK, SMALL, Duration, compete
from benchmarks.training_slow import SLOW, SLOW_RATE
from ds_lgamp.cost.traffic import predict_traffic
from ds_lgamp.schedule.placement import place_chunks
from ds_lgamp.schedule.program import build_rank_program
from ds_lgamp.schedule.spec import ProgramSpec
from testing.namespaces import NetworkUnavailable, throttled_network

NAME = "door"
SIZE = ModelSize(blocks=8, width=128, sequence=128, vocabulary=1024)
RANKS = 4
ACCUMULATION = (1, 4, 16)
STAGES = (2, 3)
PIPELINES = (1, 2)
RESIDENT = 2
HANDED_OVER = 2
"""Gathers with which the ranks of a pipeline tell each other their micro-batches, once per step."""
STEP, HOST = SMALL, ModelSize(blocks=8, width=32, sequence=8, vocabulary=64)
"""The models of the second part: one that computes, and one that hardly does."""
COMPARED = 8
"""Micro-batches of a rank per step in the second part."""
SCRIPT, BY_HAND = f"{OURS}, engine(batch)", f"{OURS}, PipelineModule by hand"
LIMIT = 1.02
"""Of a step, relative to that of the PipelineModule by hand."""


class Training(NamedTuple):
    """A configuration of the script. ``pipeline_ranks`` is None for stock DeepSpeed."""

    stage: int
    pipeline_ranks: int | None

    @property
    def name(self) -> str:
        return f"{'DeepSpeed' if self.pipeline_ranks is None else OURS} ZeRO-{self.stage}"

    def layout(self, ranks: int, size: ModelSize) -> Layout:
        pipeline_ranks = self.pipeline_ranks or 1
        return Layout(pipeline_ranks, ranks // pipeline_ranks, size)

    def contender(self, accumulation: int) -> Contender:
        """Returns the contender, whose name has the layout."""
        block = None if self.pipeline_ranks is None else {"pipeline_ranks": self.pipeline_ranks}
        name = f"{self.name}, {self.pipeline_ranks or 1} pipeline ranks"
        return Contender(name, partial(Script, stage=self.stage, accumulation=accumulation, block=block))


TRAININGS = [Training(stage, pipeline_ranks) for pipeline_ranks in (None, *PIPELINES) for stage in STAGES]
"""Stock DeepSpeed first: an engine for a pipeline changes what stock ones in the same process take for their groups."""


def run(
    size: ModelSize = SIZE,
    ranks: int = RANKS,
    accumulation: Sequence[int] = ACCUMULATION,
    step: ModelSize = STEP,
    host: ModelSize = HOST,
    repetitions: int = REPETITIONS,
) -> Record:
    """Measures both parts.

    Args:
        size: the model of the first part.
        ranks: ranks of the first part.
        accumulation: numbers of micro-batches of a rank per step, in the first part.
        step, host: the models of the second part.
        repetitions: counted steps of a contender.
    """
    record = begin(NAME)
    deviations = 0
    for micro_batches in accumulation:
        counted = count_script(ranks, size, micro_batches)
        for training in TRAININGS:
            steps = counted[training]
            _enter_counts(record, training, training.layout(ranks, size).config(micro_batches), steps)
            deviations += deviations_from_formula(training, ranks, size, micro_batches, steps)
    record.aim("gathers and reductions of ds_lgamp that differ from the formula", deviations, 0)
    for micro_batches in accumulation:
        _time_script(record, ranks, size, micro_batches, repetitions)
    for pipeline_ranks in PIPELINES:
        _compare_by_hand(record, pipeline_ranks, step, host, repetitions)
    return record


def count_script(
    ranks: int, size: ModelSize, micro_batches: int, trainings: Sequence[Training] = TRAININGS
) -> dict[Training, list[Moved]]:
    """Returns what every rank moves in a step, by training. The losses are compared with one process."""
    contenders = {training: training.contender(micro_batches) for training in trainings}
    layout = Layout(1, ranks, size)
    counted: dict[str, list[Counted]] = count(
        list(contenders.values()), layout, (micro_batches,), repetitions=1, reference=reference
    )
    return {
        training: [moved(on_rank.steps[micro_batches][0]) for on_rank in counted[contender.name]]
        for training, contender in contenders.items()
    }


def deviations_from_formula(
    training: Training, ranks: int, size: ModelSize, micro_batches: int, on_ranks: Sequence[Moved]
) -> int:
    """Returns how many gathers and reductions of ds_lgamp differ from the formula, over all ranks."""
    if training.pipeline_ranks is None:
        return 0
    right = [predicted(training, ranks, size, micro_batches, rank) for rank in range(ranks)]
    return sum((found.gathers, found.reductions) != expected for found, expected in zip(on_ranks, right))


def predicted(training: Training, ranks: int, size: ModelSize, micro_batches: int, rank: int) -> tuple[int, int]:
    """Returns gathers and reductions of a step of ds_lgamp on a global rank. The program has the micro-batches of all
    ranks of a pipeline."""
    layout = training.layout(ranks, size)
    actions, units = program_of(layout, rank, micro_batches * layout.pipeline_ranks, training.stage, RESIDENT)
    traffic = predict_traffic(actions, training.stage, [chunk for unit in units for chunk in unit.chunks], [])
    handed_over = HANDED_OVER if layout.pipeline_ranks > 1 else 0
    return traffic.gathers + handed_over, traffic.reduces


def _enter_counts(record: Record, training: Training, config: Config, on_ranks: Sequence[Moved]) -> None:
    """Enters the largest counts of any rank."""
    for metric in ("gathers", "reductions"):
        record.add(training.name, config, metric, [max(getattr(found, metric) for found in on_ranks)], "count")
    sent = max(found.collective_bytes + found.message_bytes for found in on_ranks)
    record.add(training.name, config, "bytes sent", [sent], "bytes")


def _time_script(record: Record, ranks: int, size: ModelSize, micro_batches: int, repetitions: int) -> None:
    """Enters the seconds of a step on both links."""
    contenders = [training.contender(micro_batches) for training in TRAININGS]

    def enter(link: str, found: dict[str, list[Duration]]) -> None:
        for training, durations in zip(TRAININGS, found.values()):
            config = {**training.layout(ranks, size).config(micro_batches), "link": link}
            record.add(training.name, config, "step", [duration.wall for duration in durations], "s")

    arguments = {NAME: contenders}, Layout(1, ranks, size), micro_batches, repetitions
    enter(LOOPBACK, compete(*arguments, reference=reference)[NAME])
    try:
        with throttled_network(ranks, SLOW_RATE) as network:
            enter(SLOW, compete(*arguments, network.enter, reference)[NAME])
    except NetworkUnavailable as reason:
        record.lack_network(f"nothing measured at {SLOW}", reason)


def _compare_by_hand(record: Record, pipeline_ranks: int, step: ModelSize, host: ModelSize, repetitions: int) -> None:
    """Enters times of the script and of the PipelineModule by hand, one process per pipeline rank, and their ratio."""
    config: Config = {"pipeline_ranks": pipeline_ranks, "data_ranks": 1, "micro_batches": COMPARED}
    contenders = [
        Contender(SCRIPT, partial(Script, stage=3, accumulation=COMPARED, block={"pipeline_ranks": pipeline_ranks})),
        Contender(BY_HAND, partial(ByHand, stage=3, accumulation=COMPARED, pipeline_ranks=pipeline_ranks)),
    ]
    for size, metric in ((step, "step"), (host, "step with almost no compute")):
        layout = Layout(1, pipeline_ranks, size)
        found = compete({NAME: contenders}, layout, COMPARED, 2 * repetitions, reference=reference)[NAME]
        config = {**config, "width": size.width, "sequence": size.sequence}
        for name, durations in found.items():
            record.add(name, config, metric, [duration.wall for duration in durations], "s")
            record.add(name, config, f"CPU of a {metric}", [duration.cpu for duration in durations], "s")
        pairs = list(zip(found[SCRIPT], found[BY_HAND]))
        if size is step:
            ratios = [ours.wall / theirs.wall for ours, theirs in pairs]
            record.add(SCRIPT, config, "step / step by hand", ratios, "")
            text = f"step of a script / step by hand, {pipeline_ranks} x 1 ranks"
            record.aim(text, median(ratios), LIMIT, samples=ratios)
        else:
            per_action = 1e6 / (actions_of_all(pipeline_ranks, size.blocks))
            extra = [(ours.cpu - theirs.cpu) * per_action for ours, theirs in pairs]
            record.add(SCRIPT, config, "CPU time beyond by hand, per action", extra, "us")


def actions_of_all(pipeline_ranks: int, blocks: int) -> int:
    """Returns how many actions the program of all pipeline ranks has in the second part."""
    micro_batches = COMPARED * pipeline_ranks
    placement = place_chunks("modular", blocks, pipeline_ranks)
    spec = ProgramSpec(placement, "layered", micro_batches, micro_batches, zero_stage=3)
    return sum(len(build_rank_program(spec, rank)) for rank in range(pipeline_ranks))
