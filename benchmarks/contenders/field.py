"""Chooses the contenders for each layout."""

from collections.abc import Callable
from functools import partial

from benchmarks.contenders import Contender, Layout, Training
from benchmarks.contenders.bare import Bare
from benchmarks.contenders.ddp import Ddp
from benchmarks.contenders.fsdp import Accumulation
from benchmarks.contenders.lgamp import Layered
from benchmarks.contenders.megatron_core import MegatronCore
from benchmarks.contenders.pipelining import Pipeline
from benchmarks.contenders.stock_pipeline import StockPipeline
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
"""Peers with a pipeline. "No reshard" is FSDP2's reshard_after_forward=False."""


def ours(layout: Layout) -> dict[tuple[int, int], Contender]:
    """ds_lgamp by ZeRO stage and resident chunks, up to all chunks of a rank."""
    return {
        (stage, resident): Contender(
            f"{OURS}, ZeRO-{stage}, {resident} resident",
            partial(Layered, zero_stage=stage, resident_chunks=resident),
        )
        for stage in ZERO_STAGES
        for resident in sorted({*RESIDENT_CHUNKS, layout.chunks_per_rank})
    }


def peers(layout: Layout) -> list[Contender]:
    """The other contenders."""
    return DATA_PARALLEL if layout.pipeline_ranks == 1 else PIPELINED


KEPT, SHARDED = "kept", "sharded"
"""Every rank keeps the parameters of its chunks, or gathers them only while they are needed."""
BARE = "bare loop"


def in_training(layout: Layout, recompute: bool) -> dict[str, list[Contender]]:
    """Contenders for whole training steps, by kept or sharded parameters. ds_lgamp comes first.

    Args:
        layout: ranks and model.
        recompute: whether all contenders recompute blocks, or none does.
    """
    pipelined, sharding = layout.pipeline_ranks > 1, layout.data_ranks > 1
    kept = [
        Contender(f"{OURS}, ZeRO-1", partial(_own, zero_stage=1, recompute=recompute)),
        Contender(f"{OURS}, ZeRO-1, 1F1B", partial(_own, zero_stage=1, schedule="1f1b", recompute=recompute)),
        *_with(recompute, _kept_in_pipeline(sharding) if pipelined else _kept_without_pipeline(sharding)),
    ]
    sharded = [
        Contender(f"{OURS}, ZeRO-3", partial(_own, zero_stage=3, recompute=recompute)),
        *_with(recompute, _sharded_in_pipeline() if pipelined else _sharded_without_pipeline(sharding)),
    ]
    return {KEPT: kept, SHARDED: sharded} if sharding or not pipelined else {KEPT: kept}


def _own(layout: Layout, zero_stage: int, recompute: bool, schedule: str = "layered") -> Layered:
    again = "blocks" if schedule == "1f1b" else "full"
    kind = again if recompute else "none"
    return Layered(layout, zero_stage, resident_chunks=2, recompute=kind, schedule=schedule, defer_gathers=True)


def _with(recompute: bool, peers: dict[str, Callable[..., Training]]) -> list[Contender]:
    return [Contender(name, partial(build, recompute=recompute)) for name, build in peers.items()]


def _kept_without_pipeline(sharding: bool) -> dict[str, Callable[..., Training]]:
    peers: dict[str, Callable[..., Training]] = {
        "DeepSpeed ZeRO-1": partial(Zero, stage=1),
        "Megatron-core": MegatronCore,
    }
    if sharding:
        return {
            "torch DDP, no_sync": Ddp,
            "FSDP2, kept unsharded": partial(Accumulation, deferred_sync=True, kept=True),
            **peers,
        }
    return {BARE: Bare, **peers}


def _sharded_without_pipeline(sharding: bool) -> dict[str, Callable[..., Training]]:
    zero = {"DeepSpeed ZeRO-3": partial(Zero, stage=3)}
    if not sharding:
        return dict(zero)
    return {
        "FSDP2": Accumulation,
        "FSDP2, deferred sync": partial(Accumulation, deferred_sync=True),
        **zero,
        "DeepSpeed ZeRO-3, coalesced reduction": partial(Zero, stage=3, deferred_reduce=True),
    }


def _kept_in_pipeline(sharding: bool) -> dict[str, Callable[..., Training]]:
    suffix = " + FSDP2, no reshard" if sharding else ""
    return {
        "DeepSpeed 1F1B": StockPipeline,
        **({} if sharding else _looped("")),
        f"torch 1F1B{suffix}": partial(Pipeline, schedule="1f1b", reshard=False),
        "Megatron-core 1F1B": MegatronCore,
        "Megatron-core interleaved": partial(MegatronCore, interleaved=True),
        "Megatron-core interleaved, one group": partial(MegatronCore, interleaved=True, one_group=True),
    }


def _looped(suffix: str) -> dict[str, Callable[..., Training]]:
    """torch's schedules of several stages per rank. With FSDP2, torch's runtime frees stages itself and keeps three."""
    return {
        f"torch LoopedBFS{suffix}": partial(Pipeline, schedule="looped_bfs", reshard=False),
        f"torch Interleaved1F1B{suffix}": partial(Pipeline, schedule="interleaved_1f1b", reshard=False),
    }


def _sharded_in_pipeline() -> dict[str, Callable[..., Training]]:
    return {
        **_looped(" + FSDP2, no reshard"),
        "torch LoopedBFS + FSDP2": partial(Pipeline, schedule="looped_bfs", reshard=True),
        "torch Interleaved1F1B + FSDP2": partial(Pipeline, schedule="interleaved_1f1b", reshard=True),
        "torch 1F1B + FSDP2": partial(Pipeline, schedule="1f1b", reshard=True),
    }
