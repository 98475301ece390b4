"""Tables of the pages, as Markdown, from recorded runs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from benchmarks import NAMES, ON_ACCELERATOR
from benchmarks.adapters import LINKS
from benchmarks.gpu_day.findings import NAME as GPU_DAY
from benchmarks.quickstart import quickstart_rows
from benchmarks.record import OURS, PART, PARTS, RESULTS, TYPICAL, Config, Row, is_recorded, read
from benchmarks.training import LOOPBACK
from benchmarks.training_slow import SLOW
from docs.pivot import (
    CONTENDER,
    LAYOUT,
    by_metric,
    contender,
    layout,
    median,
    metric,
    micro_batches,
    pivot,
    setting,
    with_spread,
)
from testing.markdown import table

MB = 1e-6


def machine(name: str) -> str:
    """The command, the machine and the load of a recorded run, or of every part that ran by itself."""
    facts = dict(read(name).machine)
    parts = facts.pop(PARTS, {})
    if parts:
        return "\n\n".join(_machine(f"{name} --part '{part}'", of_part) for part, of_part in parts.items())
    return _machine(name, facts)


def _machine(arguments: str, described: Mapping[str, Any]) -> str:
    facts = dict(described)
    sentence = (
        f"`python -m benchmarks run {arguments}` at commit {facts.pop('commit')} on {facts.pop('cores')} cores "
        f"({facts.pop('processor')}, {facts.pop('system')}), Python {facts.pop('python')}, torch {facts.pop('torch')}, "
        f"DeepSpeed {facts.pop('deepspeed')}; load average {facts.pop('load_before')} before, "
        f"{facts.pop('load_after')} after"
    )
    return "; ".join([sentence, *(f"{key}: {value}" for key, value in facts.items())]) + "."


def targets(*verdicts: str) -> str:
    """The targets of all benchmarks with one of ``verdicts``, and the values that were reached."""
    rows = [
        [
            name,
            target.text,
            f"{target.value:.4g}",
            f"{target.spread:.2g}",
            f"{target.limit:.4g}",
            _optional(target.floor),
        ]
        for name in (*NAMES, GPU_DAY)
        if name not in (ON_ACCELERATOR, GPU_DAY) or is_recorded(name)
        for target in read(name).targets
        if target.verdict in verdicts
    ]
    columns = ["benchmark", "target", "value", "±", "limit", "floor"]
    used = [at for at in range(len(columns)) if any(row[at] for row in rows)]
    return table([columns[at] for at in used], [[row[at] for at in used] for row in rows], numbers_from=2)


def _optional(value: float | None) -> str:
    return f"{value:.4g}" if value is not None else ""


def communication(pipeline_ranks: int) -> str:
    """Chunks held, gathers + reductions and MB that collectives send, for every contender of one layout."""
    rows = [row for row in read("communication").rows if row.config["pipeline_ranks"] == pipeline_ranks]
    counts = dict.fromkeys(micro_batches(row) for row in rows)
    held, shown = "chunks held", ("gathers", "reductions", "collective_bytes")

    def cell(rows: list[Row]) -> str:
        found = {row.metric: row.median for row in rows}
        if "held" in found:
            return f"{max(row.median for row in rows):.0f}"
        gathers, reductions, sent = (found[name] for name in shown)
        return f"{gathers:.0f} + {reductions:.0f}: {sent * MB:.1f}"

    return pivot(
        [row for row in rows if row.metric in ("held", *shown) and _differs_in_traffic(row.contender)],
        [CONTENDER],
        lambda row: held if row.metric == "held" else micro_batches(row),
        cell,
        headings={held: held, **{count: count for count in counts}},
    )


def _differs_in_traffic(name: str) -> bool:
    """Below stage 3, resident chunks do not change the traffic: one row stands for all."""
    return not name.startswith((f"{OURS}, ZeRO-1", f"{OURS}, ZeRO-2")) or name.endswith(" 2 resident")


def memory(pipeline_ranks: int) -> str:
    """Peak MB of every contender in one layout, by micro-batches; the formula's for ours in parentheses."""
    rows = [row for row in read("memory").rows if row.config["pipeline_ranks"] == pipeline_ranks]
    return pivot(rows, [CONTENDER], micro_batches, partial(_and_predicted, form=".2f", factor=MB))


def _and_predicted(rows: list[Row], form: str, factor: float = 1) -> str:
    """A cell: the measured median and, in parentheses, the predicted one if there is any."""
    measured, *predicted = (format(row.median * factor, form) for row in rows)
    return measured + "".join(f" ({value})" for value in predicted)


def turn() -> str:
    """Peak MB of every contender, with and without recomputation."""
    headings = {kind: f"recompute {kind}" for kind in ("full", "none")}
    return pivot(read("turn").rows, [CONTENDER], setting("recompute"), median(".2f", MB), headings)


def recomputation() -> str:
    """Budget, peak, step and CPU seconds of every kind of recomputation, by model. Compiled ones stand beside the step
    of ours that took turns with them."""
    cells = {"budget": median(".1f", MB), "peak": median(".1f", MB), "step": with_spread(".3f"), "CPU": median(".2f")}
    headings = {"budget": "budget, MB", "peak": "peak, MB", "step": "step, s", "CPU": "CPU, s"}
    labels = [("model", setting(PART)), ("takes turns with", setting("group")), CONTENDER]
    return pivot(read("recomputation").rows, labels, metric, by_metric(cells), headings)


def schedule(link: str) -> str:
    """Step / simulated of every contender on one kind of link."""
    rows = [row for row in read("schedule").rows if row.config["link"] == link and row.metric == "step / simulated"]
    labels = [("P", setting("pipeline_ranks")), ("N", setting("chunks_per_rank")), ("M", setting("micro_batches"))]
    return pivot(rows, labels, contender, with_spread(".3f"), numbers_from=0)


def real_steps() -> str:
    """Seconds of a step with whole backwards and with two parts, by order and micro-batches."""
    rows = [row for row in read("zero_bubble").rows if row.metric == "step"]
    heading = "{micro_batches} micro-batches, s".format
    return pivot(rows, [CONTENDER], lambda row: heading(**row.config), with_spread(".3f"), numbers_from=1)


def zero_bubble() -> str:
    """The idle time of every contender by micro-batches and link; of ours also beside the simulated step."""
    rows = [row for row in read("zero_bubble").rows if row.metric in ("idle per rank", "step / simulated")]
    labels = [("link", setting("link")), ("M", setting("micro_batches")), CONTENDER]
    cells = {"idle per rank": with_spread(".0f"), "step / simulated": with_spread(".3f")}
    headings = {"idle per rank": "idle per rank, ms", "step / simulated": "step / simulated"}
    return pivot(rows, labels, metric, by_metric(cells), headings)


def overlap() -> str:
    """The time of a step and of the waits for collectives, for every policy in every layout; the simulated waits in
    parentheses."""
    rows = read("overlap").rows
    policies = dict.fromkeys((layout(row), row.contender) for row in rows if row.metric == "exposed gather")
    alone = [
        replace(row, contender=policy)
        for where, policy in policies
        for row in rows
        if row.contender == "gloo" and layout(row) == where
    ]
    headings = {
        "gather alone": "gather alone, ms",
        "reduce alone": "reduction alone, ms",
        "exposed gather": "waits for gathers, ms",
        "exposed reduce": "for reductions, ms",
        "step / (compute + first gather + last reduction)": "step / bound",
    }
    return pivot(
        [row for row in rows if row.contender != "gloo"] + alone,
        [LAYOUT, CONTENDER],
        lambda row: row.metric.removeprefix("simulated "),
        lambda rows: with_spread(".3f")(rows) if rows[0].unit == "ratio" else _and_predicted(rows, ".1f"),
        headings,
    )


def training(name: str, width: str) -> str:
    """Seconds of a step and CPU seconds of all ranks, for every contender in the record ``name``, of the ``small`` or
    the ``wide`` model: with recomputation and, where it was measured, without."""
    rows = [row for row in read(name).rows if row.unit == "s"]
    widths = sorted({row.config["width"] for row in rows})
    return pivot(
        [row for row in rows if row.config["width"] == widths[{"small": 0, "wide": -1}[width]]],
        [LAYOUT, ("parameters", setting("parameters")), CONTENDER],
        lambda row: f"{row.metric}, recompute {row.config['recompute']}",
        by_metric({"step": with_spread(".3f"), "CPU": median(".2f")}),
    )


def fastest(*names: str, parameters: Sequence[str] = ("kept", "sharded")) -> str:
    """Seconds of a step of the fastest of ours and of the fastest peer in the records ``names``, of the small model
    with recomputation; ``parameters`` chooses the kinds of contenders."""
    rows = [row for name in names for row in read(name).rows if row.metric == "step"]
    rows = [row for row in rows if row.config["parameters"] in parameters]
    width = min(row.config["width"] for row in rows)

    def cell(rows: list[Row]) -> str:
        best = min(rows, key=lambda row: row.median)
        return f"{best.contender.removeprefix(f'{OURS}, ')}: {with_spread('.3f')([best])}"

    return pivot(
        [row for row in rows if row.config["width"] == width and row.config["recompute"] == "full"],
        [("links", setting("link")), LAYOUT, ("parameters", setting("parameters"))],
        lambda row: f"{OURS}, s" if row.contender.startswith(OURS) else "fastest peer, s",
        cell,
    )


def door() -> str:
    """Gathers, reductions, MB and seconds of a step of the script, for every number of accumulation steps."""
    whole = median(".0f")
    headings = {"gathers": "gathers", "reductions": "reductions", "bytes sent": "MB sent"}
    links = {link: f"{link}, s" for link in (LOOPBACK, SLOW)}
    cells = {"gathers": whole, "reductions": whole, "bytes sent": median(".1f", MB)}
    return pivot(
        [row for row in read("door").rows if row.metric in cells or "link" in row.config],
        [("accumulation", setting("micro_batches")), CONTENDER, LAYOUT],
        lambda row: f"{row.config.get('link', row.metric)}",
        lambda rows: cells.get(rows[0].metric, with_spread(".2f"))(rows),
        {**headings, **links},
        numbers_from=3,
    )


def by_hand() -> str:
    """Times of the script and of a PipelineModule by hand, and their comparison."""
    rows = [row for row in read("door").rows if "sequence" in row.config]
    lines = [
        [row.contender, layout(row), row.metric, f"{row.median:.3f}", f"{row.spread:.3f}", row.unit] for row in rows
    ]
    return table(["", "P x W", "metric", "median", "spread", "unit"], lines, numbers_from=3)


def adapters() -> str:
    """Gathers, MB and seconds of a step that trains adapters, for every number of accumulation steps."""
    cells = {"gathers": median(".0f"), "bytes sent": median(".1f", MB)}
    return pivot(
        read("adapters").rows,
        [("accumulation", setting("micro_batches")), CONTENDER],
        lambda row: f"{row.config.get('link', row.metric)}",
        lambda rows: cells.get(rows[0].metric, with_spread(".2f"))(rows),
        {"gathers": "gathers", "bytes sent": "MB sent", **{link: f"{link}, s" for link in LINKS}},
        numbers_from=2,
    )


def compiled() -> str:
    """Seconds of a step with compiled layers and without, with recomputation and without."""
    return pivot(
        read("compiled").rows,
        [CONTENDER],
        lambda row: f"{row.metric}, recompute {row.config['recompute']}",
        with_spread(".3f"),
        numbers_from=1,
    )


def optimizers() -> str:
    """Milliseconds and megabytes of an optimizer's step by contender and stage, and what could not be measured."""
    record = read("optimizers")

    def cell(rows: list[Row]) -> str:
        if rows[0].metric == "sent":
            return f"{rows[0].median / 1e6:.3f}"
        return f"{rows[0].median:.1f} ± {rows[0].spread / 2:.1f}"

    headings = {"step": "ms", "sent": "MB sent"}
    text = pivot(record.rows, [CONTENDER, ("stage", setting("stage"))], metric, cell, headings)
    failed = [f"- {each.contender} at stage {each.config['stage']}: {each.reason}" for each in record.failures]
    return "\n".join([text, "", "Could not be measured:", "", *failed] if failed else [text])


def tracing() -> str:
    """Every row of the record."""
    return table(
        ["", "metric", "P x W", "median", "spread", "unit"],
        [
            [
                row.contender,
                row.metric,
                f"{row.config['pipeline_ranks']} x {row.config['data_ranks']}",
                f"{row.median:.4g}",
                f"{row.spread:.4g}",
                row.unit,
            ]
            for row in read("tracing").rows
        ],
        numbers_from=3,
    )


def overhead() -> str:
    """Every row of the record."""
    return table(
        ["", "metric", "what", "median", "spread", "unit"],
        [
            [row.contender, row.metric, _words(row.config), f"{row.median:.2f}", f"{row.spread:.2f}", row.unit]
            for row in read("overhead").rows
        ],
        numbers_from=3,
    )


def _words(config: Config) -> str:
    return ", ".join(f"{value}" if isinstance(value, str) else f"{key} {value}" for key, value in config.items())


PEERS = {
    1: (
        TYPICAL,
        "FSDP2, deferred sync",
        "FSDP2, kept unsharded",
        "DeepSpeed ZeRO-3, 2 resident, coalesced reduction",
    ),
    2: (TYPICAL, "torch LoopedBFS + FSDP2, no reshard"),
}
"""The contenders of the front page, by pipeline ranks: the closest of each kind."""


def peers() -> str:
    """Chunks held, gathers, reductions, MB sent and peak MB of ``PEERS`` at 8 micro-batches."""
    whole, megabytes = median(".0f"), median(".1f", MB)
    headings = {"held": "chunks held", "gathers": "gathers", "reductions": "reductions"}
    cells = {**dict.fromkeys(headings, whole), "collective_bytes": megabytes, "peak": megabytes}
    return pivot(
        [
            row
            for row in chain(read("communication").rows, read("memory").rows)
            if row.config["micro_batches"] == 8 and row.contender in PEERS[int(row.config["pipeline_ranks"])]
        ],
        [("P x W", lambda row: f"{row.config['pipeline_ranks']} x 2"), CONTENDER],
        metric,
        by_metric(cells),
        {**headings, "collective_bytes": "MB sent", "peak": "peak MB"},
    )


def megatron() -> str:
    """Losses of Megatron-LM's script with a block and without, to the last digit of fp32."""
    return pivot(
        read("megatron").rows,
        [("", setting("place")), CONTENDER],
        lambda row: f"{row.metric}, {row.config['iteration']}",
        median(".9g"),
    )


def megatron_slow() -> str:
    """Peak MB and seconds of a step of everybody who trains in Megatron-core's loop."""
    cells = {"peak": median(".1f", MB), "step": with_spread(".2f")}
    headings = {"peak": "peak, MB", "step": f"step at {SLOW}, s"}
    return pivot(read("megatron_slow").rows, [CONTENDER, LAYOUT], metric, by_metric(cells), headings)


def growth(metrics: Mapping[str, tuple[str, float, str]]) -> str:
    """Every job along every axis; ``metrics`` has a heading, a factor and a format for each metric."""
    columns = ("axis", "pipeline_ranks", "data_ranks", "chunks_per_rank", "micro_batches")
    return pivot(
        read("growth").rows,
        [(heading, setting(key)) for heading, key in zip(("grows", "P", "W", "N", "M"), columns)],
        metric,
        by_metric({name: median(form, factor) for name, (_, factor, form) in metrics.items()}),
        {name: heading for name, (heading, _, _) in metrics.items()},
        numbers_from=1,
    )


GROWTH: dict[str, Mapping[str, tuple[str, float, str]]] = {
    "steps": {
        "CPU time per action": ("CPU time per action, us", 1, ".1f"),
        "beyond simulated, per forward and backward": ("beyond simulated, per forward and backward, us", 1, ".0f"),
    },
    "memory": {"peak memory": ("peak, MB", 1e-6, ".2f")},
    "programs": {
        "actions of one rank": ("actions of one rank", 1, ".0f"),
        "memory of one rank's, per action": ("bytes per action", 1, ".1f"),
        "build one rank's, per action": ("build, us per action", 1, ".2f"),
        "validate all, per action": ("validate, us per action", 1, ".2f"),
    },
}
"""The metrics of each part's table: heading, factor and format."""


def launch() -> str:
    """Seconds to build and to validate the programs of a large job."""
    lines = [[row.metric, f"{row.median:.2f}", f"{row.spread:.2f}"] for row in read("growth").rows if row.unit == "s"]
    return table(["", "median, s", "spread, s"], lines, numbers_from=1)


def quickstart() -> str:
    """Both runs of launch/quickstart.sh, side by side."""
    header, *rows = quickstart_rows(json.loads((RESULTS / "quickstart.json").read_text()))
    return table(header, rows, numbers_from=1)
