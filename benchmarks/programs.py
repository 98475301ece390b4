"""How long the programs of a large job take to build and to validate: ``python -m benchmarks run programs``."""

import time
from collections.abc import Callable

from benchmarks.record import REPETITIONS, Config, Record, begin
from ds_lgamp.schedule.placement import place_chunks
from ds_lgamp.schedule.program import ProgramSpec, build_program, build_rank_program
from ds_lgamp.schedule.validate import validate

NAME = "programs"
RANKS, CHUNKS_PER_RANK, MICRO_BATCHES = 64, 16, 512
BUILD_SECONDS, VALIDATE_SECONDS = 1, 60
"""Limits a launch can live with: one rank's program, the proof of all."""


def run(
    ranks: int = RANKS,
    chunks_per_rank: int = CHUNKS_PER_RANK,
    micro_batches: int = MICRO_BATCHES,
    repetitions: int = REPETITIONS,
) -> Record:
    """Builds one rank's program, and validates those of all ranks."""
    record = begin(NAME)
    placement = place_chunks("modular", ranks * chunks_per_rank, ranks)
    spec = ProgramSpec(placement, "layered", micro_batches, micro_batches, zero_stage=3)
    program = build_program(spec)
    build = _seconds(lambda: build_rank_program(spec, 0), repetitions)
    proof = _seconds(lambda: validate(spec, program), repetitions)
    config: Config = {
        "pipeline_ranks": ranks,
        "chunks_per_rank": chunks_per_rank,
        "micro_batches": micro_batches,
        "actions": sum(map(len, program)),
    }
    record.add("ds_lgamp", config, "build one rank", build, "seconds")
    record.add("ds_lgamp", config, "validate all ranks", proof, "seconds")
    record.aim("seconds to build one rank's program", record.rows[0].median, BUILD_SECONDS)
    record.aim("seconds to validate all ranks' programs", record.rows[1].median, VALIDATE_SECONDS)
    return record


def _seconds(function: Callable[[], object], repetitions: int) -> list[float]:
    samples = []
    for _ in range(repetitions):
        start = time.perf_counter()
        function()
        samples.append(time.perf_counter() - start)
    return samples
