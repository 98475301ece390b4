"""Trains BERT on four nodes behind slow Ethernet: ``python -m benchmarks run bert``.

Every node has one rank, and feeds it the same work whatever the number of nodes. So the weak-scaling efficiency is the
step of nodes that train a model each, without a network, over the step of nodes that train one together. Both run at
the same time of the day on the same cores, in turns.

All four nodes share the cores of this machine. With real compute, whatever communication costs these cores lengthens
the step, and nothing can hide it. With virtual compute, every block sleeps for a given time, and the step shows what
the order hides of the network.

The planner predicts the same efficiency from the model, the rate and the seconds of the compute alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

from benchmarks.contenders import Contender, Layout
from benchmarks.contenders.bert import BERT, VIRTUAL_BERT, Loop, bert, configuration, reference
from benchmarks.contenders.door import HostModel, Script
from benchmarks.model import ModelSize
from benchmarks.record import OURS, REPETITIONS, Config, Record, begin
from benchmarks.training import Duration, compete
from benchmarks.training_slow import SLOW, SLOW_RATE
from ds_lgamp.planner.cluster import Cluster, Link
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.predict import predict
from ds_lgamp.planner.transformers_config import model_of_config
from testing.namespaces import NetworkUnavailable, throttled_network

NAME = "bert"
NODES = 4
SIZE = ModelSize(blocks=6, width=192, sequence=128, vocabulary=1024)
REAL, VIRTUAL = "real", "virtual"
HOSTS = {REAL: BERT, VIRTUAL: VIRTUAL_BERT}
PARTS = ((REAL, SIZE, 8), (VIRTUAL, SIZE._replace(sequence=8), 8))
"""The compute, the model and the micro-batches of a rank per step. Little real compute hides in a sleep."""
ALONE = "without a network"
DDP = "torch DDP, no_sync"
STAGES = (1, 2)
EFFICIENCY, PREDICTED = "efficiency", "predicted by the planner"
GOAL = 0.9
BLOCK = {"recompute": "none", "overlap_update": True}
"""The others recompute nothing either. With updates and gathers in the next step, none runs on behind a step, where
nobody measures it."""
BYTES_PER_SECOND = 200e6 / 8
TWICE = 2
"""The planner takes gradients and weights of 16 bits to travel. Here they have 32."""


def contenders(micro_batches: int, host: HostModel = BERT) -> list[Contender]:
    """Returns stock DeepSpeed first: an engine for a pipeline changes what stock ones in the same process take for
    their groups."""
    scripts = [
        Contender(
            _named(stage, block), partial(Script, stage=stage, accumulation=micro_batches, block=block, host=host)
        )
        for block in (None, BLOCK)
        for stage in STAGES
    ]
    alone = Contender(ALONE, partial(Loop, host=host, together=False), talks=False)
    return [alone, Contender(DDP, partial(Loop, host=host)), *scripts]


def _named(stage: int, block: dict | None) -> str:
    return f"{'DeepSpeed' if block is None else f'{OURS},'} ZeRO-{stage}"


def run(parts: Sequence[tuple[str, ModelSize, int]] = PARTS, repetitions: int = REPETITIONS) -> Record:
    """Measures every part: whether compute is real or virtual, the model, and the micro-batches of a rank per step."""
    record = begin(NAME)
    record.machine["parameters"] = sum(parameter.numel() for parameter in bert(SIZE).parameters())
    for compute, size, micro_batches in parts:
        try:
            with throttled_network(NODES, SLOW_RATE) as network:
                found = measure(size, micro_batches, repetitions, HOSTS[compute], network.enter)
        except NetworkUnavailable as reason:
            record.lack_network("nothing measured", reason)
            break
        enter(record, compute, size, micro_batches, found)
    return record


def measure(
    size: ModelSize,
    micro_batches: int,
    repetitions: int,
    host: HostModel = BERT,
    enter_network: Callable[[int], None] | None = None,
) -> dict[str, list[Duration]]:
    """Runs all contenders in turns. Their losses are compared with those of one process."""
    groups = {NAME: contenders(micro_batches, host)}
    return compete(groups, Layout(1, NODES, size), micro_batches, repetitions, enter_network, reference)[NAME]


def enter(record: Record, compute: str, size: ModelSize, micro_batches: int, found: dict[str, list[Duration]]) -> None:
    """Enters the rows of one part, and its targets."""
    config: Config = {"compute": compute, "nodes": NODES, "micro_batches": micro_batches, "link": SLOW}
    alone = [duration.wall for duration in found[ALONE]]
    reached = {}
    for name, durations in found.items():
        record.add(name, config, "step", [duration.wall for duration in durations], "s")
        record.add(name, config, "CPU", [duration.cpu for duration in durations], "s")
        if name != ALONE:
            efficiencies = [first / duration.wall for first, duration in zip(alone, durations)]
            record.add(name, config, EFFICIENCY, efficiencies, "ratio")
            reached[name] = efficiencies
    for name, efficiency in predicted(size, micro_batches, median(alone)).items():
        record.add(name, config, PREDICTED, [efficiency], "ratio")
    best = max((each for name, each in reached.items() if name.startswith(OURS)), key=median)
    peer = max(median(each) for name, each in reached.items() if not name.startswith(OURS))
    where = f"{compute} compute, {micro_batches} micro-batches"
    record.aim(f"share of the step that the network costs, {where}", 1 - median(best), 1 - GOAL, samples=best)
    record.aim(f"efficiency of the best peer / of ds_lgamp, {where}", peer / median(best), 1.0)


def predicted(size: ModelSize, micro_batches: int, compute: float) -> dict[str, float]:
    """Returns the planner's efficiency of every contender, if a step computes for ``compute`` seconds."""
    model = model_of_config(NAME, configuration(size).to_dict(), size.sequence)
    common = Configuration(NODES, 1, 1, size.samples, micro_batches, recompute="none")
    configurations = {DDP: common}
    for stage in STAGES:
        # Stock DeepSpeed reduces behind the backward on a CPU, at stage 2 after every micro-batch.
        stock = replace(common, zero_stage=stage, overlaps=False, micro_batch_outer=stage == 2)
        configurations[_named(stage, None)] = stock
        layered = replace(
            common, zero_stage=stage, schedule="layered", chunks_per_rank=size.blocks, overlap_update=True
        )
        configurations[_named(stage, BLOCK)] = layered
    cluster = cluster_that_computes_for(compute, lambda cluster: predict(model, cluster, common).compute)
    return {name: compute / predict(model, cluster, each).seconds for name, each in configurations.items()}


def cluster_that_computes_for(seconds: float, compute: Callable[[Cluster], float]) -> Cluster:
    """Returns nodes of one rank whose step computes for ``seconds``. All else is free but the network between them.
    ``compute`` returns the seconds on a cluster."""
    free = {"dimension": 0.0, "launch_seconds": 0.0, "gap_seconds": 0.0, "between": 1.0}
    link = Link(BYTES_PER_SECOND / TWICE, 1e-4)
    guess = Cluster(NAME, NODES, 1, 1e10, 1e12, 1e18, link, link, efficiency=free)
    return replace(guess, peak=guess.peak * compute(guess) / seconds)
