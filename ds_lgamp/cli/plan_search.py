"""What ``ds_lgamp plan`` prints and writes: plans on equal nodes and on islands, the shortest training, predictions."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds_lgamp.cli.terminal import at_work, plain, print_rows
from ds_lgamp.fields import with_unit
from ds_lgamp.planner.cluster import Cluster
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.island_search import IslandPlan, alike, search_islands
from ds_lgamp.planner.islands import IslandCluster
from ds_lgamp.planner.load import Sent, demand_of, sent
from ds_lgamp.planner.model import Model
from ds_lgamp.planner.predict import PARTS, bandwidth_needed, limit, seconds_over_bandwidth
from ds_lgamp.planner.search import Allowed, NothingFits, Plan, best_by_method, search
from ds_lgamp.planner.shortest import DAY
from ds_lgamp.planner.work import is_own, is_quick
from ds_lgamp.planner.write import DISK, OnIslands, describe, why_not, write

HEADS = ("method", "W", "P", "T", "chunks", "batch", "ZeRO", "recompute", "step")
"""How every table of plans begins."""
CHUNKS, BATCH = HEADS.index("chunks"), HEADS.index("batch")
EXPERTS = CHUNKS
"""Where tables of models with experts that ranks may divide have the number of these ranks."""
LOSS = 0.05
"""How much longer than on an unlimited network a step may take at the bandwidth that is printed."""
CHANGES = {
    "bf16": 'State in bf16, rounded by chance, changes results: docs/offload.md, "State in bf16".',
    "8bit": "Moments in 8 bits change results, and the script makes the optimizer of bitsandbytes that has them: "
    'docs/offload.md, "Moments in 8 bits".',
}
"""What the state of a plan's optimizer means for its user."""


def run_search(options: argparse.Namespace, model: Model, cluster: Cluster) -> int:
    """Prints the best plans, and writes what the options ask for. Returns the exit status.

    Raises ValueError, with a sentence, if nothing fits.
    """
    with at_work("comparing configurations"):
        plans = search(model, cluster, options.batch_size, options.objective, options.top, allowed=_allowed(options))
    if options.json:
        print(json.dumps(as_json(model, cluster, plans, options.tokens)))
    else:
        print_table(model, cluster, plans, options.tokens)
    if options.plot is not None:
        with at_work("drawing"):
            plot(model, cluster, plans, options.plot)
    if options.write is not None:
        with at_work("looking for a plan that a script can run"):
            runnable = best_runnable(model, cluster, plans, options)
        write(model, runnable.configuration, cluster, options.write)
        _say_written(options.write, _written(runnable, plans[0]))
    return 0


def _allowed(options: argparse.Namespace) -> Allowed:
    return Allowed(rounded=options.rounded, state=options.state or "fp32")


def search_on_islands(options: argparse.Namespace, model: Model, cluster: IslandCluster) -> int:
    """Does what :func:`run_search` does, on a cluster file with islands, which may also lack something."""
    with at_work("comparing configurations"):
        plans = search_islands(model, cluster, options.batch_size, options.top)
    if options.json:
        print(json.dumps(islands_as_json(model, cluster, plans, options.tokens)))
    else:
        print_island_table(model, cluster, plans, options.tokens)
    if options.write is not None:
        written = write_best(model, cluster, plans, options.write, Path(options.cluster))
        _say_written(options.write, describe(written.configuration))
    return 0


def _say_written(folder: Path, plan: str) -> None:
    print(f"{folder} has ds_config.json and launch.sh of: {plan}", file=sys.stderr)


def days_of(seconds: float, of: Configuration, model: Model, tokens: float | None) -> float | None:
    """Returns the days that ``tokens`` take in steps of ``seconds``; None if their number is unknown."""
    return None if tokens is None else tokens / (of.sequences * model.sequence_length) * seconds / DAY


def dollars_of(plan: Plan, model: Model, tokens: float | None) -> float | None:
    """Returns the price of ``tokens``, or of a step if their number is unknown; None without a price."""
    if plan.dollars is None or tokens is None:
        return plan.dollars
    return plan.dollars * tokens / (plan.configuration.sequences * model.sequence_length)


def as_json(model: Model, cluster: Cluster, plans: Sequence[Plan], tokens: float | None) -> dict[str, Any]:
    """Returns what the table has, with numbers in seconds, bytes and dollars."""
    best = plans[0].configuration
    return {
        "model": {
            "name": model.name,
            "parameters": model.parameters,
            "active_parameters": model.active_parameters,
            **({"adapter_parameters": model.adapter_parameters} if model.adapters else {}),
        },
        "cluster": {"name": cluster.name, "gpus": cluster.gpus},
        "plans": [
            {
                "method": plan.method,
                **plan.configuration.to_json(),
                "seconds": plan.prediction.seconds,
                "parts_seconds": plan.prediction.parts,
                "mfu": plan.prediction.mfu,
                "memory_bytes": plan.memory._asdict(),
                "memory_bytes_total": plan.memory.total,
                "fits_with_bytes_to_spare": cluster.memory - plan.memory.total,
                "host_bytes_to_spare": cluster.host.memory - plan.memory.host,
                "days": days_of(plan.prediction.seconds, plan.configuration, model, tokens),
                "dollars": dollars_of(plan, model, tokens),
                **({"bytes_sent": sent(model, plan.configuration)._asdict()} if model.adapters else {}),
            }
            for plan in plans
        ],
        "exact_seconds": plans[0].prediction.seconds if is_quick(best) else None,
        "bandwidth_needed_bytes_per_second": bandwidth_needed(model, cluster, best, LOSS),
        "reasons": reasons(plans),
    }


def print_table(model: Model, cluster: Cluster, plans: Sequence[Plan], tokens: float | None) -> None:
    """Prints the plans as a table, and the sentences about the best one."""
    shows_host = any(plan.memory.host for plan in plans)
    heads = [*HEADS, "MFU", "bubble", "network", "GPU", *(["host"] if shows_host else [])]
    heads[EXPERTS:EXPERTS] = ["E"] if model.divided_by else []
    heads += [*(["days"] if tokens else []), *(["cost"] if plans[0].dollars is not None else [])]
    rows = [cells(plan, model, tokens, shows_host) for plan in plans]
    best = plans[0].configuration
    console = print_rows(title(model, f"{best.gpus} of {cluster.gpus}", cluster.name, best), heads, rows, sys.stdout)
    for sentence in reasons(plans):
        console.print(sentence)
    if any(plan.configuration.rounds for plan in plans):
        console.print(
            'What travels rounded changes results a little: docs/partition.md, "Rounded travel", and docs/networks.md, '
            '"Hidden states that travel rounded".'
        )
    if best.on_disk:
        disk = with_unit(plans[0].memory.disk * cluster.gpus_per_node, "B")
        console.print(
            f'The disk of a node holds {disk}. The written files name {DISK} there: docs/offload.md, "A disk".'
        )
    if best.state in CHANGES:
        console.print(CHANGES[best.state])
    if model.adapters:
        console.print(_words_of_sent(sent(model, best)))
    needed = bandwidth_needed(model, cluster, best, LOSS)
    if needed is not None:
        console.print(
            f"A step takes {LOSS:.0%} longer than on an unlimited network if a network card carries "
            f"{with_unit(needed * 8, 'bit/s')}; {cluster.name} has {with_unit(cluster.between.bandwidth * 8, 'bit/s')}."
        )
    console.print(
        "chunks: per rank (resident); batch: micro-batches x sequences, by group; step: of layered plans action by "
        "action on the clock, of others and with a ~ by formulas; network: exposed share of the step; GPU: memory per "
        "GPU"
        + ("; recompute: of auto, how many of all forwards" if any(plan.configuration.kept for plan in plans) else "")
        + ("; E: ranks that divide the experts of a layer" if model.divided_by else "")
        + ("; host: memory on the host for each GPU." if shows_host else ".")
    )


def reasons(plans: Sequence[Plan]) -> list[str]:
    """Returns a sentence about what sets the fastest plan apart from the best plan of another method, if there is one,
    and a sentence about what limits it.

    Args:
        plans: at least one; the first is the one that is explained.
    """
    best, *others = best_by_method(plans).values()
    sentences = [_against(best, others[0])] if others else []
    return [*sentences, limit(best.prediction)]


def _against(best: Plan, other: Plan) -> str:
    mine, theirs = best.prediction.parts, other.prediction.parts
    name = max(mine, key=lambda part: theirs[part] - mine[part])
    seconds, slower = best.prediction.seconds, other.prediction.seconds
    if slower < 0.995 * seconds:
        return f"{best.method} leads by this objective, although {other.method} takes {1 - slower / seconds:.0%} less."
    gained = 1 - seconds / slower
    if gained < 0.005:
        return f"{best.method} takes about as long as the best plan with {other.method}."
    verb = "takes" if name in ("bubble", "optimizer", "compute") else "take"
    return (
        f"{best.method} takes {gained:.0%} less time than the best plan with {other.method}, above all "
        f"because {PARTS[name]} {verb} {mine[name]:.3g} s of a step instead of {theirs[name]:.3g} s."
    )


def _words_of_sent(sent: Sent) -> str:
    words = {
        "gathers of adapters": sent.gathers,
        "gathers of frozen weights": sent.frozen_gathers,
        "reductions": sent.reductions,
        "messages to other pipeline ranks": sent.messages,
    }
    told = ", ".join(f"{with_unit(size, 'B')} in {name}" for name, size in words.items() if size) or "nothing"
    bus = {"loads": sent.loaded, "stores": sent.stored}
    beside = "".join(f", and it {verb} {with_unit(size, 'B')}" for verb, size in bus.items() if size)
    return f"In a step of the first plan, the rank that sends most sends {told}{beside}."


def title(model: Model, gpus: str, cluster: str, of: Configuration) -> str:
    """Returns the line above a table of plans."""
    active = f" ({model.active_parameters / 1e9:.4g} active)" if model.experts > 1 else ""
    active += f" and {model.adapter_parameters / 1e9:.4g} of adapters" if model.adapters else ""
    return (
        f"{model.name}, {model.parameters / 1e9:.4g} billion parameters{active}, on {gpus} GPUs of {cluster}, "
        f"{of.sequences} sequences of {model.sequence_length} tokens per step"
    )


def _layout_cells(method: str, of: Configuration) -> list[str]:
    """Returns the cells of :data:`HEADS`, but for the last one."""
    ranks = of.data_ranks, of.pipeline_ranks, of.tensor_ranks
    chunks = "-" if of.micro_batch_outer else str(of.chunks_per_rank)
    batch = f"{of.micro_batches} x {of.micro_batch}"
    again = f" {of.recomputed_pairs}/{of.computes // 2}" if of.recompute == "auto" else ""
    return [method, *map(str, ranks), chunks, batch, str(of.zero_stage), of.recompute + again]


def cells(plan: Plan, model: Model, tokens: float | None, shows_host: bool = False) -> list[str]:
    """Returns the cells of a row."""
    of, prediction = plan.configuration, plan.prediction
    parts = prediction.parts
    network = sum(
        parts[name] for name in ("tensor_parallel", "expert_parallel", "messages", "data_parallel", "gathers")
    )
    days, dollars = days_of(prediction.seconds, of, model, tokens), dollars_of(plan, model, tokens)
    layout = _layout_cells(plan.method, of)
    if of.zero_stage == 3 and not of.micro_batch_outer:
        layout[CHUNKS] += f" ({min(of.resident_chunks, of.chunks_per_rank)})"
    if of.group < of.micro_batches:
        layout[BATCH] += f" by {of.group}"
    layout[EXPERTS:EXPERTS] = [str(of.expert_ranks)] if model.divided_by else []
    return [
        *layout,
        ("~" if is_own(of) and not is_quick(of) else "") + f"{plain(prediction.seconds, 3)} s",
        f"{prediction.mfu:.1%}",
        f"{prediction.bubble / prediction.seconds:.1%}",
        f"{network / prediction.seconds:.1%}",
        f"{plain(plan.memory.total / 1e9, 3)} GB",
        *([f"{plain(plan.memory.host / 1e9, 3)} GB" if plan.memory.host else "-"] if shows_host else []),
        *([] if days is None else [plain(days, 3)]),
        *([] if dollars is None else [f"${plain(dollars, 4)}"]),
    ]


def best_runnable(model: Model, cluster: Cluster, plans: Sequence[Plan], options: argparse.Namespace) -> Plan:
    """Returns the best plan that a script can run; ``plans`` are the best ones.

    Raises ValueError with the reason for the first one if no plan can be run.
    """
    complaint = why_not(model, plans[0].configuration)
    if complaint is None:
        return plans[0]
    try:
        return search(
            model,
            cluster,
            options.batch_size,
            options.objective,
            best=1,
            suits=lambda configuration: why_not(model, configuration) is None,
            allowed=_allowed(options),
        )[0]
    except NothingFits as error:
        raise ValueError(f"--write finds no plan that a script can run: {complaint}") from error


def _written(written: Plan, best: Plan) -> str:
    """Returns a sentence on what is written and, if it is not the ``best`` plan, how much slower it is."""
    words = describe(written.configuration)
    if written.configuration == best.configuration:
        return words
    slower = written.prediction.seconds / best.prediction.seconds - 1
    # By cost or memory, the first plan may be slower.
    compared = f"{slower:.1%} longer" if slower >= 0 else f"{-slower:.1%} less time"
    return f"{words}; no script can run the first plan, and this one takes {compared}"


def islands_as_json(
    model: Model, cluster: IslandCluster, plans: Sequence[IslandPlan], tokens: float | None
) -> dict[str, Any]:
    """Returns what the table has, with numbers in seconds and bytes."""
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
                "days": days_of(plan.seconds, plan.configuration, model, tokens),
            }
            for plan in plans
        ],
    }


def print_island_table(model: Model, cluster: IslandCluster, plans: Sequence[IslandPlan], tokens: float | None) -> None:
    """Prints the plans as a table, and which order of ranks the best one takes."""
    best = plans[0]
    above = title(model, str(cluster.gpus), cluster.name, best.configuration)
    heads = [*HEADS, "exposed", "between", "in islands", "GPU", *(["days"] if tokens else [])]
    console = print_rows(above, heads, [_island_cells(plan, model, tokens) for plan in plans], sys.stdout)
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


def _island_cells(plan: IslandPlan, model: Model, tokens: float | None) -> list[str]:
    days, sent = days_of(plan.seconds, plan.configuration, model, tokens), plan.assignment.bytes_sent
    return [
        *_layout_cells(plan.method, plan.configuration),
        f"{plain(plan.seconds, 3)} s",
        f"{plan.exposed / plan.seconds:.1%}",
        with_unit(sent["between"], "B"),
        with_unit(sent["island"], "B"),
        f"{plain(plan.memory.total / 1e9, 3)} GB",
        *([] if days is None else [plain(days, 3)]),
    ]


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


POINTS, DECADES = 60, 2.0
"""How many bandwidths are drawn, and how many powers of ten they reach below and above the cluster's own."""


def plot(model: Model, cluster: Cluster, plans: Sequence[Plan], path: Path) -> None:
    """Draws one line for the best plan of each method into ``path``.

    Raises ValueError if matplotlib is missing or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib; install ds_lgamp[plot], or leave --plot out") from None
    own = cluster.between.bandwidth
    bandwidths = [own * 10 ** (DECADES * (2 * point / (POINTS - 1) - 1)) for point in range(POINTS)]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for plan in best_by_method(plans).values():
        seconds = seconds_over_bandwidth(model, cluster, plan.configuration, bandwidths)
        axes.plot([bandwidth * 8 / 1e9 for bandwidth in bandwidths], seconds, label=describe(plan.configuration))
    axes.axvline(own * 8 / 1e9, color="grey", linestyle=":", label=f"{cluster.name}")
    axes.set(
        xscale="log", yscale="log", xlabel="Gbit/s of a network card", ylabel="seconds of a step", title=model.name
    )
    axes.legend(fontsize="small")
    try:
        figure.savefig(path, format="svg")
    except OSError as error:
        raise ValueError(f"--plot is '{path}', which cannot be written ({error.strerror}); name another file") from None
