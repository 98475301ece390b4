"""What was found on a GPU, as a record: how far losses were from plain torch's, how fast trainings were beside each
other and in how much memory, and the largest models."""

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.gpt.contenders import BASELINE
from benchmarks.gpt.offload import DEEPSPEED, FSDP2_IN_MEMORY, IN_MEMORY, ON_HOST
from benchmarks.gpu_day.compiled import COMPILED
from benchmarks.gpu_day.recomputation import BUDGET, FIXED, WITHIN
from benchmarks.gpu_day.runner import Report
from benchmarks.record import OURS, PART, Record, finish

NAME = "gpu_day"
DIFFERENCE, WAITS = "largest relative difference of a loss", "places where the host waits in a step"
RATE, PEAK, PARAMETERS = "tokens per second", "peak memory", "parameters"
WHAT = "what"
"""Key of a row's configuration: the trial."""
FOUND, SECONDS = "largest difference", "seconds"
"""Keys of the parts' results."""
UNMEASURED = ("failure", "outcome", "not run")
"""Keys that say why something could not be measured."""


def keep(reports: Sequence[Report]) -> None:
    """Writes what the reports have to record, each in the place of its part. Raises SystemExit if one is of a dry run,
    or if none has anything to record."""
    dry = [report["part"] for report in reports if report.get("dry_run")]
    if dry:
        raise SystemExit(f"{', '.join(dry)}: a dry run is no record")
    records = {report["part"]: as_record(report) for report in reports}
    found = {part: record for part, record in records.items() if record.rows or record.failures}
    if not found:
        raise SystemExit("no part has anything to record")
    for part, record in found.items():
        finish(record, part)


def as_record(report: Report) -> Record:
    """Returns the rows of one part: for every training that is compared with plain torch's, for every speed, and for
    every largest model."""
    record = Record(NAME, dict(report.get("machine") or {}))
    for where, what, found in trainings(report):
        config = {PART: report["part"], "where": where, WHAT: what}
        record.add(OURS, config, DIFFERENCE, [found[FOUND]], "ratio")
        if isinstance(found.get("host waits"), list):
            record.add(OURS, config, WAITS, [len(found["host waits"])], "")
        if "failure" in found:
            record.fail(OURS, config, found["failure"])
    if record.rows:
        text = f"{report['part']}: trainings with other losses than plain torch's"
        record.aim(text, len(record.failures), 0)
    for found in report["results"].values():
        if "contender" in found:
            _enter_training(record, report["part"], found)
    _aim_at_offloading(record, report["part"])
    _aim_at_recomputation(record, report["part"])
    _aim_at_compiled(record, report["part"])
    return record


def trainings(report: Report) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields where, what and the comparison of each training of a part."""
    for name, found in report["results"].items():
        where, _, what = name.partition(", ")
        if FOUND in found:
            yield where, what, found
        for inner, of_inner in found.items():
            if isinstance(of_inner, dict) and FOUND in of_inner:
                yield where, f"{what}, {inner}", of_inner


def _enter_training(record: Record, part: str, found: dict[str, Any]) -> None:
    """Enters the speed of a contender in a trial, or its largest model; or why there is none."""
    contender, config = found["contender"], {PART: part}
    if "micro-batches" in found:
        config |= {"micro_batches": found["micro-batches"], WHAT: found["trial"]}
    reason = next((found[key] for key in UNMEASURED if key in found), None)
    if reason is not None:
        record.fail(contender, config, reason)
    elif "micro-batches" in found:
        record.add(contender, config, RATE, [found["tokens"] / seconds for seconds in found[SECONDS]], "tokens/s")
        record.add(contender, config, PEAK, [found["peak bytes"]], "bytes")
    else:
        record.add(contender, config | {"layers": found["layers"]}, PARAMETERS, [found[PARAMETERS]], "")


def _aim_at_offloading(record: Record, part: str) -> None:
    """Compares speeds with the most micro-batches that both have, and sizes."""
    rates = {(row.contender, row.config["micro_batches"]): row.median for row in record.rows if row.metric == RATE}
    sizes = {row.contender: row.median for row in record.rows if row.metric == PARAMETERS}
    for peer, times in ((DEEPSPEED, 3.0), (IN_MEMORY, 0.9)):
        both = [number for contender, number in rates if contender == peer and (ON_HOST, number) in rates]
        if both:
            text = f"{part}: {RATE} of {peer} / of {ON_HOST}, {max(both)} micro-batches"
            record.aim(text, rates[peer, max(both)] / rates[ON_HOST, max(both)], 1 / times)
    if {FSDP2_IN_MEMORY, ON_HOST} <= sizes.keys():
        text = f"{part}: {PARAMETERS} of {FSDP2_IN_MEMORY} / of {ON_HOST}"
        record.aim(text, sizes[FSDP2_IN_MEMORY] / sizes[ON_HOST], 1 / 8)


def _aim_at_recomputation(record: Record, part: str) -> None:
    """Compares the training within a budget with the budget, with full recomputation, and with the fastest FSDP2 that
    takes no more."""
    rates, peaks = (_medians(record, metric) for metric in (RATE, PEAK))
    within = next((key for key in rates if key[0] == WITHIN), None)
    if within is None:
        return
    allowed = float(BUDGET.removesuffix(" GB")) * 1e9
    record.aim(f"{part}: {PEAK} of {WITHIN} / {BUDGET}", peaks[within] / allowed, 1.01)
    rivals = {
        "full recomputation": [rate for key, rate in rates.items() if key == (FIXED, "full")],
        f"the fastest FSDP2 in {BUDGET}": [
            rate for key, rate in rates.items() if key[0] == FSDP2_IN_MEMORY and peaks[key] <= allowed
        ],
    }
    for name, found in rivals.items():
        if found:
            record.aim(f"{part}: {RATE} of {name} / of {WITHIN}", max(found) / rates[within], 1.0)


def _aim_at_compiled(record: Record, part: str) -> None:
    """Compares ds_lgamp with the bare loop, both compiled or neither."""
    rates = _medians(record, RATE)
    for suffix in ("", f", {COMPILED}"):
        for name, size in list(rates):
            if name == f"{OURS}{suffix}" and (f"{BASELINE}{suffix}", size) in rates:
                text = f"{part}: {RATE} of {BASELINE}{suffix} / of {name}, {size}"
                record.aim(text, rates[f"{BASELINE}{suffix}", size] / rates[name, size], 1.0)


def _medians(record: Record, metric: str) -> dict[tuple[str, str], float]:
    """Returns the medians of a metric by contender and trial."""
    return {(row.contender, str(row.config[WHAT])): row.median for row in record.rows if row.metric == metric}
