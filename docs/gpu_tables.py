"""Tables of what ran on a GPU."""

from benchmarks import ON_ACCELERATOR, gpu_memory
from benchmarks.gpu_day.findings import DIFFERENCE, NAME, PARAMETERS, PEAK, RATE, WAITS
from benchmarks.record import PART, PARTS, Failure, Record, Row, is_recorded, read
from docs.pivot import CONTENDER, median, micro_batches, pivot, setting, with_spread
from testing.markdown import table

OFFLOADING = "offload"
"""The part of the day that times it."""


def gpu() -> str:
    """Every run on one accelerator, also those that failed; a sentence if no run is recorded."""
    if not is_recorded(ON_ACCELERATOR):
        return f"Nothing is recorded. `python -m benchmarks run {ON_ACCELERATOR}` measures on a GPU."
    record = read(ON_ACCELERATOR)
    rate = "tokens per second"
    cells = {
        rate: with_spread(".0f"),
        "model flop utilisation": median(".1%"),
        "peak memory": median(".1f", 1e-9),
        "peak reserved memory": median(".1f", 1e-9),
        "loss": median(".4f"),
    }

    def column(entry: Row | Failure) -> str:
        if isinstance(entry, Failure):
            return rate
        return "loss" if entry.metric.startswith("loss") else entry.metric

    headings = dict(zip(cells, ("tokens/s", "of peak", "peak memory, GB", "reserved, GB", "last loss")))
    shown = pivot(
        [*record.rows, *record.failures],
        [("size", setting("size")), ("recompute", setting("recompute")), CONTENDER],
        column,
        lambda entries: entries[0].reason if isinstance(entries[0], Failure) else cells[column(entries[0])](entries),
        headings,
    )
    return f"{_machine(f'run {ON_ACCELERATOR}', record)}\n\n{shown}"


def memory() -> str:
    """The peak that was measured beside the one that is explained."""
    rows = {name: [row for row in read(gpu_memory.NAME).rows if row.metric == name] for name in gpu_memory.METRICS}
    lines = [
        (each.contender, *(str(each.config[key]) for key in ("size", "recompute", "micro_batches")))
        + (f"{each.median * ratio.median / 1e9:.2f}", f"{each.median / 1e9:.2f}", f"{ratio.median:.4f}")
        for each, ratio in zip(*rows.values())
    ]
    return table(("", "size", "recompute", "M", "measured, GB", "explained, GB", "ratio"), lines, 3)


def settings() -> str:
    """The largest difference of a loss for every setting and layout."""
    return _differences("settings", "ranks")


def stages() -> str:
    """The same for every ZeRO stage on one rank, and waits of the host."""
    waits = [row.median for row in read(NAME).rows if row.metric == WAITS]
    counted = f"In a step of each of these {len(waits)}, the host waited for the device at {sum(waits):.0f} places."
    return f"{_differences('stages')}\n\n{counted}"


def offloading() -> str:
    """Tokens per second of every contender by micro-batches, or why there are none, and the peak with the most."""
    record = read(NAME)
    rows = [row for row in record.rows if row.metric == RATE and row.config[PART] == OFFLOADING]
    numbers = sorted({int(row.config["micro_batches"]) for row in rows})
    peaks = [row for row in record.rows if row.metric == PEAK and row.config[PART] == OFFLOADING]
    peaks = [row for row in peaks if row.config["micro_batches"] == numbers[-1]]
    missing = [failure for failure in record.failures if failure.config[PART] == OFFLOADING]
    peak = f"peak memory at M = {numbers[-1]}, GB"

    def column(entry: Row | Failure) -> str:
        return peak if isinstance(entry, Row) and entry.metric == PEAK else micro_batches(entry)

    def cell(entries: list[Row] | list[Failure]) -> str:
        (entry,) = entries
        if isinstance(entry, Failure):
            return entry.reason
        return f"{entry.median / 1e9:.1f}" if entry.metric == PEAK else with_spread(",.0f")([entry])

    headings = {name: name for name in (*(f"M = {number}" for number in numbers), peak)}
    return pivot([*rows, *missing, *peaks], [CONTENDER], column, cell, headings)


def largest() -> str:
    """The largest model of every contender in a part of the device, or why there is none."""
    record = read(NAME)
    sizes = [row for row in record.rows if row.metric == PARAMETERS]
    missing = [failure for failure in record.failures if failure.config[PART] == "largest"]
    lines = [(row.contender, str(row.config["layers"]), f"{row.median / 1e9:.2f}") for row in sizes]
    lines += [(failure.contender, "", failure.reason) for failure in missing]
    return table(("", "layers", "parameters, billions"), lines, 1)


def day_machines() -> str:
    """Where each part ran."""
    facts = ("accelerator", "cores", "torch", "nccl", "deepspeed", "commit")
    lines = [(part, *(str(own.get(fact, "")) for fact in facts)) for part, own in read(NAME).machine[PARTS].items()]
    return table(("part", "GPU", "cores", "torch", "NCCL", "DeepSpeed", "commit"), lines, 7)


def _differences(*parts: str) -> str:
    rows = [row for row in read(NAME).rows if row.config[PART] in parts and row.metric == DIFFERENCE]
    return pivot(rows, [("setting", setting("what"))], setting("where"), median(".2g"))


def _machine(command: str, record: Record) -> str:
    facts = record.machine
    nccl = f", NCCL {facts['nccl']}" if "nccl" in facts else ""
    return (
        f"`python -m benchmarks {command}` at commit {facts['commit']} on one {facts['accelerator']} with "
        f"{facts['cores']} cores ({facts['processor']}), Python {facts['python']}, torch {facts['torch']}{nccl}, "
        f"DeepSpeed {facts['deepspeed']}."
    )
