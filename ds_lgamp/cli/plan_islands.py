"""``ds_lgamp plan --model`` on a cluster file with islands: the ranked table, the order of ranks, and bytes by kind of
link."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from ds_lgamp.cli.terminal import at_work, plain, print_rows
from ds_lgamp.planner.configuration import describe
from ds_lgamp.planner.fields import with_unit
from ds_lgamp.planner.island_search import IslandPlan, alike, search_islands
from ds_lgamp.planner.islands import IslandCluster
from ds_lgamp.planner.load import demand_of
from ds_lgamp.planner.model import Model
from ds_lgamp.planner.write import OnIslands, why_not, write

DAY = 86400
TOP = 10


def run_search(options: argparse.Namespace, model: Model, cluster: IslandCluster, output: TextIO) -> int:
    """Prints the best plans, and writes what the options ask for. Returns the exit status.

    Raises ValueError, with a sentence, if nothing fits or the file lacks something.
    """
    with at_work("comparing configurations"):
        plans = search_islands(model, cluster, options.batch_size, options.top or TOP)
    if options.json:
        json.dump(as_json(model, cluster, plans, options.tokens), output)
        output.write("\n")
    else:
        print_table(model, cluster, plans, options.tokens, output)
    if options.write is not None:
        written = write_best(model, cluster, plans, options.write, Path(options.cluster))
        print(
            f"{options.write} has ds_config.json and launch.sh of: {describe(written.configuration)}", file=sys.stderr
        )
    return 0


def as_json(model: Model, cluster: IslandCluster, plans: Sequence[IslandPlan], tokens: float | None) -> dict[str, Any]:
    """Returns what the table tells, with numbers in seconds and bytes."""
    return {
        "model": {"name": model.name, "parameters": model.parameters},
        "cluster": {"name": cluster.name, "gpus": cluster.gpus, "islands": [one.name for one in cluster.islands]},
        "plans": [
            {
                "method": plan.method,
                **plan.configuration.to_json(),
                "seconds": plan.seconds,
                "exposed_seconds": plan.exposed,
                "bytes_by_link": dict(plan.assignment.bytes_sent),
                "busiest_seconds_by_link": dict(plan.assignment.seconds),
                "order": plan.assignment.order,
                "memory_bytes": plan.memory._asdict(),
                "memory_bytes_total": plan.memory.total,
                "days": _days(plan, model, tokens),
            }
            for plan in plans
        ],
    }


def print_table(
    model: Model, cluster: IslandCluster, plans: Sequence[IslandPlan], tokens: float | None, output: TextIO
) -> None:
    """Prints the plans as a table, and which order of ranks the best one takes."""
    sequences = plans[0].configuration.sequences
    title = (
        f"{model.name}, {model.parameters / 1e9:.4g} billion parameters, on {cluster.gpus} GPUs of {cluster.name}, "
        f"{sequences} sequences of {model.sequence_length} tokens per step"
    )
    heads = [
        "method",
        "W",
        "P",
        "T",
        "chunks",
        "batch",
        "ZeRO",
        "recompute",
        "step",
        "exposed",
        "between",
        "in islands",
    ]
    rows = [_cells(plan, model, tokens) for plan in plans]
    console = print_rows(title, [*heads, "GPU", *(["days"] if tokens else [])], rows, output)
    best = plans[0]
    console.print(f"Ranks of the first plan: {best.assignment.order}.")
    if len(set(best.assignment.pipeline_speeds)) > 1:
        speeds = " : ".join(f"{speed:g}" for speed in best.assignment.pipeline_speeds)
        shares = "share layers by them" if best.configuration.speeds else "have equal work"
        console.print(f"Its pipeline ranks have the speeds {speeds} and {shares}.")
    console.print(
        f"Without a network between nodes it would take {best.seconds - best.exposed:.3g} s; the busiest link between "
        f"islands carries bytes for {best.assignment.seconds['between']:.3g} s of its step."
    )
    console.print(
        "chunks: per rank; batch: micro-batches x sequences; exposed: share of the step that the network adds; "
        "between, in islands: what all ranks send over links of that kind in a step; GPU: memory per GPU."
    )


def _cells(plan: IslandPlan, model: Model, tokens: float | None) -> list[str]:
    of, days = plan.configuration, _days(plan, model, tokens)
    sent = plan.assignment.bytes_sent
    between, island = with_unit(sent["between"], "B"), with_unit(sent["island"], "B")
    return [
        plan.method,
        *map(str, (of.data_ranks, of.pipeline_ranks, of.tensor_ranks)),
        "-" if of.micro_batch_outer else str(of.chunks_per_rank),
        f"{of.micro_batches} x {of.micro_batch}",
        str(of.zero_stage),
        of.recompute,
        f"{plain(plan.seconds, 3)} s",
        f"{plan.exposed / plan.seconds:.1%}",
        between,
        island,
        f"{plain(plan.memory.total / 1e9, 3)} GB",
        *([] if days is None else [plain(days, 3)]),
    ]


def _days(plan: IslandPlan, model: Model, tokens: float | None) -> float | None:
    if tokens is None:
        return None
    return tokens / (plan.configuration.sequences * model.sequence_length) * plan.seconds / DAY


def write_best(
    model: Model, cluster: IslandCluster, plans: Sequence[IslandPlan], folder: Path, source: Path
) -> IslandPlan:
    """Writes the files of the first plan that a script can run into ``folder``, and returns it. The launch line gives
    ``source``, the cluster file, to ``ds_lgamp run``.

    Raises ValueError with the first reason if no plan can be written, or if nodes have different numbers of GPUs.
    """
    if len({island.gpus_per_node for island in cluster.islands}) > 1:
        raise ValueError(f"--write starts as many processes on every node, but gpus_per_node differ in {cluster.name}")
    complaints = []
    for plan in plans:
        complaint = why_not(model, plan.configuration)
        if complaint is None:
            demand = replace(demand_of(model, plan.configuration), order=plan.assignment.order)
            write(model, plan.configuration, alike(cluster, fast=True), folder, OnIslands(source, demand))
            return plan
        complaints.append(complaint)
    raise ValueError(f"--write finds no plan that a script can run: {complaints[0]}")
