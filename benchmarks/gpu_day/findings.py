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


def keep(reports: Sequence[Report]) -> None:
    """Writes what the reports have to record, each in the place of its part. Raises SystemExit if one is of a dry run,
    or if none has anything to record."""
    dry = [report["part"] for report in reports if report.get("dry_run")]
    if dry:
        raise SystemExit(f"{', '.join(dry)}: a dry run is no record")
    records = [record for record in map(as_record, reports) if record.rows]
    if not records:
        raise SystemExit("no part has anything to record")
    for record in records:
        finish(record, str(record.rows[0].config[PART]))


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
    compared = len(record.rows)
    for name, found in report["results"].items():
        _enter_offloading(record, report["part"], name, found)
    if compared:
        text = f"{report['part']}: trainings with other losses than plain torch's"
        record.aim(text, len(record.failures), 0)
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


def _enter_offloading(record: Record, part: str, name: str, found: dict[str, Any]) -> None:
    """Enters the speed of a contender with a number of micro-batches, or the largest model of a contender."""
    if RATE in found:
        config = {PART: part, "micro_batches": found["micro-batches"]}
        rates = [found["tokens"] / seconds for seconds in found[SECONDS]]
        record.add(found["contender"], config, RATE, rates, "tokens/s")
        record.add(found["contender"], config, PEAK, [found["peak bytes"]], "bytes")
    elif "layers" in found:
        record.add(name, {PART: part, "layers": found["layers"]}, PARAMETERS, [found[PARAMETERS]], "")


def _aim_at_offloading(record: Record, part: str) -> None:
    rates = {(row.contender, row.config.get("micro_batches")): row.median for row in record.rows if row.metric == RATE}
    sizes = {row.contender: row.median for row in record.rows if row.metric == PARAMETERS}
    most = max((int(number or 0) for _, number in rates), default=0)
    for peer, times in ((DEEPSPEED, 3.0), (IN_MEMORY, 0.9)):
        if {(peer, most), (ON_HOST, most)} <= rates.keys():
            text = f"{part}: {RATE} of {peer} / of {ON_HOST}, {most} micro-batches"
            record.aim(text, rates[peer, most] / rates[ON_HOST, most], 1 / times)
    if {FSDP2_IN_MEMORY, ON_HOST} <= sizes.keys():
        text = f"{part}: {PARAMETERS} of {FSDP2_IN_MEMORY} / of {ON_HOST}"
        record.aim(text, sizes[FSDP2_IN_MEMORY] / sizes[ON_HOST], 1 / 8)
