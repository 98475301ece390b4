"""What trained on a GPU, and how far its losses were from plain torch's, as a record."""

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.gpu_day.runner import Report
from benchmarks.record import OURS, RESULTS, Record

NAME = "gpu_day"
DIFFERENCE, WAITS = "largest relative difference of a loss", "places where the host waits in a step"
FOUND = "largest difference"
"""The key of the parts' results."""


def keep(reports: Sequence[Report]) -> None:
    """Writes the record of the reports. Raises SystemExit if one is of a dry run, or if none has losses."""
    (RESULTS / f"{NAME}.json").write_text(as_record(reports).to_json())


def as_record(reports: Sequence[Report]) -> Record:
    """Returns a row for every training that is compared with plain torch's. Its configuration has the ``part``, and
    ``where`` and ``what`` was trained."""
    dry = [report["part"] for report in reports if report.get("dry_run")]
    machines = [report["machine"] for report in reports if any(trainings(report))]
    if dry or not machines:
        reason = f"{', '.join(dry)}: a dry run is no record" if dry else "no part has losses to record"
        raise SystemExit(reason)
    record = Record(NAME, dict(machines[0]))
    for report in reports:
        for where, what, found in trainings(report):
            config = {"part": report["part"], "where": where, "what": what}
            record.add(OURS, config, DIFFERENCE, [found[FOUND]], "ratio")
            if isinstance(found.get("host waits"), list):
                record.add(OURS, config, WAITS, [len(found["host waits"])], "")
            if "failure" in found:
                record.fail(OURS, config, found["failure"])
    record.aim("trainings with other losses than plain torch's", len(record.failures), 0)
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
