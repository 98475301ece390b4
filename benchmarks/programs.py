"""How long the programs of a large job take to build and to validate: ``python -m benchmarks.programs``.

Limits a launch can live with, on one core: one rank's program in 1 s, the proof of all 64 in 60 s.
"""

import json
import statistics
import time
from collections.abc import Callable

from benchmarks.report import RESULTS
from ds_lgamp.schedule.placement import place_chunks
from ds_lgamp.schedule.program import ProgramSpec, build_program, build_rank_program
from ds_lgamp.schedule.validate import validate

RANKS, CHUNKS_PER_RANK, MICRO_BATCHES = 64, 16, 512
REPETITIONS = 5


def median_seconds(function: Callable[[], object], repetitions: int = REPETITIONS) -> float:
    seconds = []
    for _ in range(repetitions):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main() -> None:
    placement = place_chunks("modular", RANKS * CHUNKS_PER_RANK, RANKS)
    spec = ProgramSpec(placement, "layered", MICRO_BATCHES, MICRO_BATCHES, zero_stage=3)
    one = median_seconds(lambda: build_rank_program(spec, 0))
    program = build_program(spec)
    proof = median_seconds(lambda: validate(spec, program), repetitions=1)
    record = {
        "pipeline_ranks": RANKS,
        "chunks_per_rank": CHUNKS_PER_RANK,
        "micro_batches": MICRO_BATCHES,
        "actions": sum(map(len, program)),
        "build_one_rank_seconds": round(one, 3),
        "validate_all_ranks_seconds": round(proof, 1),
    }
    (RESULTS / "programs.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
