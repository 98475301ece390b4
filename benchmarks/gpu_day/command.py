"""The command ``python -m benchmarks gpu-day``."""

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_day import PARTS, findings
from benchmarks.gpu_day.runner import FAILED, as_table, run_parts

NAME = "gpu-day"


def add(commands: Any) -> None:
    """Adds the command to the subparsers of ``python -m benchmarks``."""
    day = commands.add_parser(
        NAME,
        help="try everything that needs a GPU, the most valuable first",
        description="Runs parts that need a GPU, the most valuable first. Each writes DIR/PART.json. The same command "
        "goes on where it stopped: parts that passed are skipped, all others run again.",
    )
    day.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the results")
    day.add_argument("--part", choices=[part.name for part in PARTS], help="run this one only")
    day.add_argument("--seconds", type=float, help="start no part that could take longer than what is left of these")
    day.add_argument("--record", action="store_true", help="keep what was found, for the pages")
    day.add_argument("--dry-run", action="store_true", help="on the CPU, at tiny sizes")


def run(options: argparse.Namespace) -> int:
    """Runs the parts and prints a table. Returns 1 if one failed."""
    if options.record and options.dry_run:
        raise SystemExit("--record keeps what a GPU computed; leave out --dry-run")
    if not options.dry_run and not torch.cuda.is_available():
        raise SystemExit("no GPU is there; use a machine with one, or try it out on the CPU with --dry-run")
    # Stops the running part, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    reports = run_parts(PARTS, options.out, options.seconds, options.dry_run, options.part)
    print(as_table(reports))
    if options.record:
        findings.keep(reports)
    return int(any(report["status"] == FAILED for report in reports))
