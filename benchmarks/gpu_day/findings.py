"""What was found on a GPU, as a record: how far losses were from plain torch's, and speed and size with offloading."""

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.gpt.offload import DEEPSPEED, FSDP2_IN_MEMORY, IN_MEMORY, ON_HOST
from benchmarks.gpu_day.runner import Report
from benchmarks.record import OURS, PART, Record, finish

NAME = "gpu_day"
DIFFERENCE, WAITS = "largest relative difference of a loss", "places where the host waits in a step"
RATE, PEAK, PARAMETERS = "tokens per second", "peak memory", "parameters"
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
    """Returns the rows of one part: for every training that is compared with plain torch's, for every speed of
    offloading, and for every largest model."""
    record = Record(NAME, dict(report.get("machine") or {}))
    for where, what, found in trainings(report):
        config = {PART: report["part"], "where": where, "what": what}
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
            _enter_offloading(record, report["part"], found)
    _aim_at_offloading(record, report["part"])
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


def _enter_offloading(record: Record, part: str, found: dict[str, Any]) -> None:
    """Enters the speed of a contender with a number of micro-batches, or its largest model; or why there is none."""
    contender, config = found["contender"], {PART: part}
    if "micro-batches" in found:
        config["micro_batches"] = found["micro-batches"]
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
