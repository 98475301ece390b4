"""``python -m benchmarks run NAME`` measures and records; ``python -m docs`` writes the pages from the records.
``python -m benchmarks gpu-day`` is for a first hour on a GPU."""

import argparse
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import IN_PARTS, NAMES, ON_ACCELERATOR
from benchmarks.gpt.sizes import SIZES
from benchmarks.gpu_day import command
from benchmarks.record import Record, finish


def command_line() -> argparse.ArgumentParser:
    """Returns the parser of all benchmarks."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    names = commands.add_parser("run", help="measure, and write benchmarks/results/NAME.json").add_subparsers(
        dest="name", required=True
    )
    for name in NAMES:
        run = names.add_parser(name)
        run.add_argument("--json", action="store_true", help="print the record as JSON instead of a table")
        if name == ON_ACCELERATOR:
            run.add_argument("--size", choices=SIZES, help="measure this one only, and write no file")
            run.add_argument("--trace", type=Path, help="folder for a profile of one step, as Chrome traces")
        if name in IN_PARTS:
            run.add_argument("--part", choices=IN_PARTS[name], help="measure this one only, and keep the others' rows")
    command.add(commands)
    return parser


def main() -> None:
    options = command_line().parse_args()
    if options.command == command.NAME:
        sys.exit(command.run(options))
    arguments, part = {}, getattr(options, "part", None)
    if part is not None:
        arguments["part"] = part
    if options.name == ON_ACCELERATOR:
        arguments = {"size": options.size, "trace": options.trace}
    else:
        # Every contender runs on gloo and the CPU, whatever the machine has.
        os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
    with others_on_stderr():
        record: Record = importlib.import_module(f"benchmarks.{options.name}").run(**arguments)
    if arguments.get("size") is None:
        finish(record, part)
    print(record.to_json() if options.json else as_text(record))


@contextmanager
def others_on_stderr() -> Iterator[None]:
    """Sends the output of frameworks, here and in the ranks, from stdout to stderr."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def as_text(record: Record) -> str:
    """Rows and targets in columns."""
    rows = [("contender", "configuration", "metric", "median", "spread", "unit")]
    for row in record.rows:
        config = " ".join(f"{key}={value}" for key, value in row.config.items())
        rows.append((row.contender, config, row.metric, f"{row.median:.6g}", f"{row.spread:.3g}", row.unit))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    for failure in record.failures:
        config = " ".join(f"{key}={value}" for key, value in failure.config.items())
        lines.append(f"FAILED: {failure.contender} {config}: {failure.reason}")
    for target in record.targets:
        lines.append(f"{target.verdict}: {target.text}: {target.value:.6g}, limit {target.limit:.6g}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
