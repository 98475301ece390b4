"""Who competes in which layout."""

from functools import partial

from benchmarks.contenders import Contender, Layout
from benchmarks.contenders.fsdp import Accumulation
from benchmarks.contenders.lgamp import Layered
from benchmarks.record import OURS

ZERO_STAGES = (1, 2, 3)
RESIDENT_CHUNKS = (1, 2, 3)


def ours(layout: Layout) -> dict[tuple[int, int], Contender]:
    """ds_lgamp by ZeRO stage and resident chunks, from one to all of a rank."""
    return {
        (stage, resident): Contender(
            f"{OURS}, ZeRO-{stage}, {resident} resident",
            partial(Layered, zero_stage=stage, resident_chunks=resident),
        )
        for stage in ZERO_STAGES
        for resident in (*RESIDENT_CHUNKS, layout.chunks_per_rank)
    }


def peers(layout: Layout) -> list[Contender]:
    """Everybody else."""
    if layout.pipeline_ranks == 1:
        return [
            Contender("FSDP2", Accumulation),
            Contender("FSDP2, deferred sync", partial(Accumulation, deferred_sync=True)),
            Contender("FSDP2, kept unsharded", partial(Accumulation, deferred_sync=True, kept=True)),
        ]
    return []
