"""``python -m testing.fuzz programs|configs|checkpoints|trainings --count N --seed S``. Exits with 1 if there is a
defect."""

import argparse
import sys

from testing.fuzz.run import RUNS
from testing.fuzz.trainings import of_case

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m testing.fuzz", description=__doc__)
    parser.add_argument("subject", choices=sorted(RUNS))
    parser.add_argument("--count", type=int, default=1000, metavar="N", help="number of cases; default %(default)s")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the first case; default %(default)s")
    parser.add_argument("--only", type=int, metavar="K", help="run case K alone; of a training, also print the script")
    options = parser.parse_args()
    if options.only is not None:
        options.seed, options.count = options.only, 1
        if options.subject == "trainings":
            print(of_case(options.only).file)
    tally = RUNS[options.subject](options.count, options.seed)
    print(tally.text())
    sys.exit(bool(tally.defects))
