"""Tables of the pages, as Markdown, from recorded runs."""

import json
from collections.abc import Mapping
from typing import Any

from benchmarks import NAMES, ON_ACCELERATOR
from benchmarks.record import OURS, RESULTS, TYPICAL, Config, Row, is_recorded, read
from docs.blocks import table


def machine(name: str) -> str:
    """The command, the machine and the load of a recorded run."""
    facts = dict(read(name).machine)
    sentence = (
        f"`python -m benchmarks run {name}` at commit {facts.pop('commit')} on {facts.pop('cores')} cores "
        f"({facts.pop('processor')}, {facts.pop('system')}), Python {facts.pop('python')}, torch {facts.pop('torch')}, "
        f"DeepSpeed {facts.pop('deepspeed')}; load average {facts.pop('load_before')} before, "
        f"{facts.pop('load_after')} after"
    )
    return "; ".join([sentence, *(f"{key}: {value}" for key, value in facts.items())]) + "."


def targets() -> str:
    """What was aimed at and what was reached, of all benchmarks."""
    rows = [
        [name, target.text, f"{target.value:.5g}", f"{target.limit:.5g}", "yes" if target.met else "**no**"]
        for name in NAMES
        if name != ON_ACCELERATOR or is_recorded(name)
        for target in read(name).targets
    ]
    return table(["benchmark", "target", "value", "limit", "met"], rows, numbers_from=2)


def communication(pipeline_ranks: int) -> str:
    """Of every contender in one layout: chunks held, gathers + reductions, MB sent by collectives."""
    record = read("communication")
    rows = [row for row in record.rows if row.config["pipeline_ranks"] == pipeline_ranks]
    found = {(row.contender, row.config["micro_batches"], row.metric): row.median for row in rows}
    counts = list(dict.fromkeys(row.config["micro_batches"] for row in rows))
    lines = []
    for contender in dict.fromkeys(row.contender for row in rows if _is_shown(row.contender)):
        measured = [count for count in counts if (contender, count, "held") in found]
        cells = {
            count: f"{found[contender, count, 'gathers']:.0f} + {found[contender, count, 'reductions']:.0f}: "
            f"{found[contender, count, 'collective_bytes'] / 1e6:.1f}"
            for count in measured
        }
        held = max(found[contender, count, "held"] for count in measured)
        lines.append([contender, f"{held:.0f}", *(cells.get(count, "") for count in counts)])
    return table(["", "chunks held", *(f"M = {count}" for count in counts)], lines, numbers_from=1)


def _is_shown(contender: str) -> bool:
    """Below stage 3, resident chunks do not change what is sent: one row stands for all."""
    return not contender.startswith((f"{OURS}, ZeRO-1", f"{OURS}, ZeRO-2")) or contender.endswith(" 2 resident")


def memory(pipeline_ranks: int) -> str:
    """Peak MB of every contender in one layout, by micro-batches; of ours, what the formula says behind it."""
    rows = [row for row in read("memory").rows if row.config["pipeline_ranks"] == pipeline_ranks]
    found = {(row.contender, row.config["micro_batches"], row.metric): row.median / 1e6 for row in rows}
    counts = list(dict.fromkeys(row.config["micro_batches"] for row in rows))
    lines = []
    for contender in dict.fromkeys(row.contender for row in rows):
        cells = []
        for count in counts:
            peak, formula = (found.get((contender, count, metric)) for metric in ("peak", "formula"))
            cells.append(("" if peak is None else f"{peak:.2f}") + ("" if formula is None else f" ({formula:.2f})"))
        lines.append([contender, *cells])
    return table(["", *(f"M = {count}" for count in counts)], lines, numbers_from=1)


def turn() -> str:
    """Peak MB of every contender, by what is recomputed."""
    found: dict[str, dict[Any, str]] = {}
    for row in read("turn").rows:
        found.setdefault(row.contender, {})[row.config["recompute"]] = f"{row.median / 1e6:.2f}"
    lines = [[contender, cells.get("full", ""), cells.get("none", "")] for contender, cells in found.items()]
    return table(["", "recompute full", "recompute none"], lines, numbers_from=1)


def schedule(link: str) -> str:
    """Step / simulated of every contender on one kind of link."""
    rows = [row for row in read("schedule").rows if row.config["link"] == link and row.metric == "step / simulated"]
    contenders = list(dict.fromkeys(row.contender for row in rows))
    found: dict[tuple, dict[str, str]] = {}
    for row in rows:
        setting = tuple(f"{row.config[key]}" for key in ("pipeline_ranks", "chunks_per_rank", "micro_batches"))
        found.setdefault(setting, {})[row.contender] = f"{row.median:.3f} ± {row.spread / 2:.3f}"
    lines = [[*setting, *(cells.get(name, "") for name in contenders)] for setting, cells in found.items()]
    return table(["P", "N", "M", *contenders], lines, numbers_from=0)


def latency() -> str:
    """The bubble of every contender at every length of compute, and how it compares with both simulations."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in read("latency").rows:
        lengths = "{forward_ms:g} + {backward_ms:g}".format(**row.config)
        found.setdefault((lengths, row.contender), {})[row.metric] = row
    metrics = ("bubble", "bubble / simulated bubble", "bubble / simulated bubble, one message after another")
    lines = [
        [*key, *(f"{rows[metric].median:.3f} ± {rows[metric].spread / 2:.3f}" for metric in metrics)]
        for key, rows in found.items()
        if "bubble" in rows
    ]
    return table(["forward + backward, ms", "", *metrics], lines, numbers_from=2)


def overlap() -> str:
    """Of every policy in every layout: how long a step takes, and how long compute waits for collectives; what the
    simulation says of the waits behind it."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in read("overlap").rows:
        layout = "{pipeline_ranks} x {data_ranks}".format(**row.config)
        found.setdefault((layout, row.contender), {})[row.metric] = row
    lines = []
    for (layout, contender), rows in found.items():
        if "exposed gather" in rows:
            alone = [f"{found[layout, 'gloo'][f'{kind} alone'].median:.1f}" for kind in ("gather", "reduce")]
            waits = [
                f"{rows[f'exposed {kind}'].median:.1f} ({rows[f'simulated exposed {kind}'].median:.1f})"
                for kind in ("gather", "reduce")
            ]
            bound = rows["step / (compute + first gather + last reduction)"]
            lines.append([layout, contender, *alone, *waits, f"{bound.median:.3f} ± {bound.spread / 2:.3f}"])
    header = ["P x W", "", "gather alone, ms", "reduction alone, ms", "waits for gathers, ms", "for reductions, ms"]
    return table([*header, "step / bound"], lines, numbers_from=2)


def network() -> str:
    """Of every layout, rate and order of work: how long a step takes, and of the layered order beside the bound."""
    found: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in read("network").rows:
        layout = "{pipeline_ranks} x {data_ranks}".format(**row.config)
        found.setdefault((layout, str(row.config["rate"]), row.contender), {})[row.metric] = row
    lines = []
    for (layout, rate, contender), rows in found.items():
        step = f"{rows['step'].median:.0f} ± {rows['step'].spread / 2:.0f}"
        bound, simulated = (f"{rows[name].median:.0f}" if name in rows else "" for name in ("bound", "simulated"))
        ratio = f"{rows['step / bound'].median:.3f}" if "step / bound" in rows else ""
        lines.append([layout, rate, contender, step, bound, ratio, simulated])
    columns = ["P x W", "rate", "", "step, ms", "bound, ms", "step / bound", "simulated, ms"]
    return table(columns, lines, numbers_from=3)


def training(name: str, width: str) -> str:
    """Seconds of a step and CPU seconds of all ranks, of every contender in the record ``name``, of the ``small`` or
    the ``wide`` model: with recomputation and, where it was measured, without."""
    rows = [row for row in read(name).rows if row.unit == "s"]
    widths = sorted({row.config["width"] for row in rows})
    rows = [row for row in rows if row.config["width"] == widths[{"small": 0, "wide": -1}[width]]]
    kinds = list(dict.fromkeys(row.config["recompute"] for row in rows))
    found: dict[tuple, dict[tuple, str]] = {}
    for row in rows:
        layout = f"{row.config['pipeline_ranks']} x {row.config['data_ranks']}"
        setting = (layout, row.config["parameters"], row.contender)
        cell = f"{row.median:.3f} ± {row.spread / 2:.3f}" if row.metric == "step" else f"{row.median:.2f}"
        found.setdefault(setting, {})[row.config["recompute"], row.metric] = cell
    columns = {(kind, metric): f"{metric}, recompute {kind}" for kind in kinds for metric in ("step", "CPU")}
    lines = [[*setting, *(cells.get(column, "") for column in columns)] for setting, cells in found.items()]
    return table(["P x W", "parameters", "", *columns.values()], lines, numbers_from=3)


def gathers() -> str:
    """Seconds of a step with gathers behind it and with deferred ones, in every layout at every link."""
    found: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in read("gathers").rows:
        layout = "{pipeline_ranks} x {data_ranks}".format(**row.config)
        setting = layout, str(row.config["link"]), str(row.config["zero_stage"])
        found.setdefault(setting, {})[row.contender] = row
    lines = [
        [
            *setting,
            *(f"{row.median:.3f}" + (f" ± {row.spread / 2:.3f}" if row.unit == "s" else "") for row in rows.values()),
        ]
        for setting, rows in found.items()
    ]
    return table(["P x W", "link", "stage", "behind the step, s", "deferred, s", "ratio"], lines, numbers_from=2)


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


def peers() -> str:
    """Of the contenders at 8 micro-batches: chunks held, gathers, reductions, MB sent and peak MB."""
    traffic, peaks = read("communication"), read("memory")
    found = {
        (row.contender, row.config["pipeline_ranks"], row.metric): row.median
        for row in (*traffic.rows, *peaks.rows)
        if row.config["micro_batches"] == 8
    }
    lines = []
    for contender, ranks in dict.fromkeys((contender, ranks) for contender, ranks, _ in found):
        if contender.startswith(OURS) and contender != TYPICAL:
            continue
        held, gathers, reductions, sent, peak = (
            found[contender, ranks, metric] for metric in ("held", "gathers", "reductions", "collective_bytes", "peak")
        )
        counts = (f"{number:.0f}" for number in (held, gathers, reductions))
        lines.append([f"{ranks} x 2", contender, *counts, f"{sent / 1e6:.1f}", f"{peak / 1e6:.1f}"])
    header = ["P x W", "", "chunks held", "gathers", "reductions", "MB sent", "peak MB"]
    return table(header, lines, numbers_from=2)


def checkpoint() -> str:
    """Rates of both contenders at every number of ranks."""
    found: dict[tuple[Any, str], dict[str, Row]] = {}
    for row in read("checkpoint").rows:
        if row.unit == "MB/s":
            found.setdefault((row.config["ranks"], row.metric), {})[row.contender] = row
    lines = [
        [f"{ranks}", metric, *(f"{row.median:.0f} ± {row.spread / 2:.0f}" for row in rows.values())]
        for (ranks, metric), rows in found.items()
    ]
    return table(["ranks", "MB/s", *next(iter(found.values()))], lines, numbers_from=2)


def saving() -> str:
    """What a save in the background costs."""
    rows = [row for row in read("checkpoint").rows if row.unit != "MB/s"]
    lines = [[row.metric, f"{row.median:.0f}", f"{row.spread:.0f}", row.unit] for row in rows]
    return table(["", "median", "spread", "unit"], lines, numbers_from=1)


def megatron() -> str:
    """Losses of Megatron-LM's script with a block and without, to the last digit of fp32."""
    rows = read("megatron").rows
    columns = list(dict.fromkeys(f"{row.metric}, {row.config['iteration']}" for row in rows))
    lines: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        lines.setdefault((str(row.config["place"]), row.contender), []).append(f"{row.median:.9g}")
    return table(["", "", *columns], [[*names, *cells] for names, cells in lines.items()], numbers_from=2)


def gpu() -> str:
    """Every run on one accelerator, those that failed too; a sentence where none was at hand."""
    if not is_recorded(ON_ACCELERATOR):
        return f"No GPU was at hand: nothing is recorded. `python -m benchmarks run {ON_ACCELERATOR}` measures on one."
    record = read(ON_ACCELERATOR)
    found: dict[tuple, dict[str, Row]] = {}
    for row in record.rows:
        found.setdefault((row.config["size"], row.config["recompute"], row.contender), {})[row.metric] = row
    lines = [[f"{cell}" for cell in run] + _gpu_cells(rows) for run, rows in found.items()]
    for failure in record.failures:
        run = (failure.config["size"], failure.config["recompute"], failure.contender)
        lines.append([f"{cell}" for cell in run] + [failure.reason, "", "", ""])
    header = ["size", "recompute", "", "tokens/s", "of peak", "peak memory, GB", "last loss"]
    return f"{machine(ON_ACCELERATOR)}\n\n{table(header, lines, numbers_from=3)}"


def _gpu_cells(rows: dict[str, Row]) -> list[str]:
    rate, share, peak = (rows.get(metric) for metric in ("tokens per second", "model flop utilisation", "peak memory"))
    (loss,) = (row for metric, row in rows.items() if metric.startswith("loss"))
    assert rate is not None, "whatever was measured has a rate"
    return [
        f"{rate.median:.0f} ± {rate.spread / 2:.0f}",
        "" if share is None else f"{share.median:.1%}",
        "" if peak is None else f"{peak.median / 1e9:.1f}",
        f"{loss.median:.4f}",
    ]


def growth(metrics: Mapping[str, tuple[str, float, str]]) -> str:
    """Of every job along every axis: by metric a heading, a factor and a format."""
    found: dict[tuple, dict[str, Row]] = {}
    for row in read("growth").rows:
        if row.metric in metrics:
            found.setdefault(tuple(row.config.values()), {})[row.metric] = row
    lines = [
        [*map(str, job), *(format(rows[metric].median * factor, form) for metric, (_, factor, form) in metrics.items())]
        for job, rows in found.items()
    ]
    headings = [heading for heading, _, _ in metrics.values()]
    return table(["grows", "P", "W", "N", "M", *headings], lines, numbers_from=1)


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
"""By part of the benchmark, what its table shows."""


def launch() -> str:
    """Seconds to build and to validate the programs of a large job."""
    lines = [[row.metric, f"{row.median:.2f}", f"{row.spread:.2f}"] for row in read("growth").rows if row.unit == "s"]
    return table(["", "median, s", "spread, s"], lines, numbers_from=1)


def quickstart() -> str:
    """Both runs of launch/quickstart.sh, side by side."""
    header, *rows = quickstart_rows(json.loads((RESULTS / "quickstart.json").read_text()))
    return table(header, rows, numbers_from=1)


def quickstart_rows(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Label, stock and ds_lgamp of every row of the quickstart's table, the header first."""
    stock, lgamp = summary["stock"], summary["lgamp"]

    def row(label: str, key: str, form: str, scale: float = 1) -> tuple[str, str, str]:
        return label, format(stock[key] * scale, form), format(lgamp[key] * scale, form)

    return [
        ("", "stock", "ds_lgamp"),
        ("loss, first step", f"{stock['losses'][0]:.4f}", f"{lgamp['losses'][0]:.4f}"),
        ("loss, last step", f"{stock['losses'][-1]:.4f}", f"{lgamp['losses'][-1]:.4f}"),
        row("collectives per step and rank", "collectives_per_step", "d"),
        row("pipeline messages sent per step and rank", "messages_per_step", "d"),
        row("MB sent per step and rank", "bytes_per_step", ".2f", 1e-6),
        row("peak memory of tensors, MB", "peak_bytes", ".1f", 1e-6),
        row("pipeline bubble, simulated", "bubble", ".1%"),
        row("seconds per step", "step_seconds", ".2f"),
    ]
