"""``python -m testing.chaos --minutes N --seed S``. Exits with 1 if something went wrong."""

import argparse
import json
import secrets
import sys

from testing import ROOT
from testing.chaos import __doc__ as description
from testing.chaos.jobs import Job
from testing.chaos.record import add
from testing.chaos.run import run, tell
from testing.public.outcome import commit_of


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m testing.chaos", description=description)
    parser.add_argument("--minutes", type=float, default=3, help="default %(default)s")
    parser.add_argument("--seed", type=int, help="of all jobs; by default a new one, which is printed")
    parser.add_argument("--job", type=json.loads, help="run this one only: a line that an earlier run printed")
    parser.add_argument("--record", action="store_true", help="append the run to benchmarks/results/chaos.json")
    options = parser.parse_args()
    if options.job is not None:
        sys.exit(bool(tell(Job(**options.job), {}).complaints))
    seed = secrets.randbelow(100_000) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    done = run(options.minutes, seed, commit_of(ROOT))
    print(json.dumps(done._asdict()))
    if options.record:
        add(done)
    sys.exit(bool(done.complaints))


if __name__ == "__main__":
    main()
