"""Who competes in which layout."""

from functools import partial

from benchmarks.contenders import Contender, Layout
from benchmarks.contenders.fsdp import Accumulation
from benchmarks.contenders.lgamp import Layered
from benchmarks.contenders.pipelining import Pipeline
from benchmarks.contenders.zero import Zero
from benchmarks.record import OURS

ZERO_STAGES = (1, 2, 3)
RESIDENT_CHUNKS = (1, 2, 3)

DATA_PARALLEL = [
    Contender("FSDP2", Accumulation),
    Contender("FSDP2, deferred sync", partial(Accumulation, deferred_sync=True)),
    Contender("FSDP2, kept unsharded", partial(Accumulation, deferred_sync=True, kept=True)),
    Contender("DeepSpeed ZeRO-2", partial(Zero, stage=2)),
    Contender("DeepSpeed ZeRO-2, coalesced reduction", partial(Zero, stage=2, deferred_reduce=True)),
    Contender("DeepSpeed ZeRO-3", partial(Zero, stage=3)),
    Contender("DeepSpeed ZeRO-3, 2 resident", partial(Zero, stage=3, resident_chunks=2)),
    Contender(
        "DeepSpeed ZeRO-3, 2 resident, coalesced reduction",
        partial(Zero, stage=3, resident_chunks=2, deferred_reduce=True),
    ),
]
"""Peers without a pipeline."""

PIPELINED = [
    Contender("torch LoopedBFS + FSDP2", partial(Pipeline, schedule="looped_bfs", reshard=True)),
    Contender("torch LoopedBFS + FSDP2, no reshard", partial(Pipeline, schedule="looped_bfs", reshard=False)),
    Contender("torch Interleaved1F1B + FSDP2", partial(Pipeline, schedule="interleaved_1f1b", reshard=True)),
    Contender(
        "torch Interleaved1F1B + FSDP2, no reshard", partial(Pipeline, schedule="interleaved_1f1b", reshard=False)
    ),
]
"""Peers with one. "No reshard" is FSDP2's reshard_after_forward=False."""


def ours(layout: Layout) -> dict[tuple[int, int], Contender]:
    """ds_lgamp by ZeRO stage and resident chunks, from one to all of a rank."""
    return {
        (stage, resident): Contender(
            f"{OURS}, ZeRO-{stage}, {resident} resident",
            partial(Layered, zero_stage=stage, resident_chunks=resident),
        )
        for stage in ZERO_STAGES
        for resident in sorted({*RESIDENT_CHUNKS, layout.chunks_per_rank})
    }


def peers(layout: Layout) -> list[Contender]:
    """Everybody else."""
    return DATA_PARALLEL if layout.pipeline_ranks == 1 else PIPELINED
