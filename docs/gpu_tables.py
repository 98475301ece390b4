"""Tables of what ran on a GPU."""

from benchmarks import ON_ACCELERATOR, gpu_memory
from benchmarks.gpu_day.losses import DIFFERENCE, NAME, WAITS
from benchmarks.record import Failure, Record, Row, is_recorded, read
from docs.pivot import CONTENDER, median, pivot, setting, with_spread
from testing.markdown import table


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
        (each.contender, each.config["size"], each.config["recompute"], f"{each.median * ratio.median / 1e9:.2f}")
        + (f"{each.median / 1e9:.2f}", f"{ratio.median:.4f}")
        for each, ratio in zip(*rows.values())
    ]
    return table(("", "size", "recompute", "measured, GB", "explained, GB", "ratio"), lines, 3)


def settings() -> str:
    """The largest difference of a loss for every setting and layout."""
    return _differences("settings", "ranks")


def stages() -> str:
    """The same for every ZeRO stage on one rank, and waits of the host."""
    waits = [row.median for row in read(NAME).rows if row.metric == WAITS]
    counted = f"In a step of each of these {len(waits)}, the host waited for the device at {sum(waits):.0f} places."
    return f"{_differences('stages')}\n\n{counted}"


def day_machine() -> str:
    """Where the parts ran."""
    return _machine("gpu-day", read(NAME))


def _differences(*parts: str) -> str:
    rows = [row for row in read(NAME).rows if row.config["part"] in parts and row.metric == DIFFERENCE]
    return pivot(rows, [("setting", setting("what"))], setting("where"), median(".2g"))


def _machine(command: str, record: Record) -> str:
    facts = record.machine
    nccl = f", NCCL {facts['nccl']}" if "nccl" in facts else ""
    return (
        f"`python -m benchmarks {command}` at commit {facts['commit']} on one {facts['accelerator']} with "
        f"{facts['cores']} cores ({facts['processor']}), Python {facts['python']}, torch {facts['torch']}{nccl}, "
        f"DeepSpeed {facts['deepspeed']}."
    )
