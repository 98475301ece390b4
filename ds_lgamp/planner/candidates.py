"""The configurations that a search looks at."""

from collections.abc import Iterator
from dataclasses import replace

from ds_lgamp.planner.cluster import Cluster
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.model import Model

LARGEST_MICRO_BATCH = 64
"""In sequences."""


def candidates(model: Model, cluster: Cluster, sequences: int) -> Iterator[Configuration]:
    """Yields every configuration worth a look that uses the whole cluster and divides the batch evenly."""
    for tensor_ranks in tensor_rank_numbers(model, cluster):
        for pipeline_ranks in divisors(cluster.gpus // tensor_ranks):
            data_ranks = cluster.gpus // tensor_ranks // pipeline_ranks
            if pipeline_ranks > model.layers or sequences % data_ranks:
                continue
            per_rank = sequences // data_ranks
            for micro_batch in divisors(per_rank):
                if micro_batch > LARGEST_MICRO_BATCH:
                    break
                plain = Configuration(
                    data_ranks=data_ranks,
                    pipeline_ranks=pipeline_ranks,
                    tensor_ranks=tensor_ranks,
                    micro_batch=micro_batch,
                    micro_batches=per_rank // micro_batch,
                )
                for way in _ways(model, plain):
                    for recompute in ("none", "full"):
                        yield replace(way, recompute=recompute)


def _ways(model: Model, plain: Configuration) -> Iterator[Configuration]:
    """Yields the methods, chunks and ZeRO stages that suit the layout of ``plain``: stock ones first."""
    ranks, partitioned = plain.pipeline_ranks, plain.data_ranks > 1
    for zero_stage in (0, 1) if partitioned else (0,):
        yield replace(plain, schedule="1f1b", zero_stage=zero_stage)
        for chunks in chunks_per_rank(model, ranks):
            if chunks > 1 and ranks > 1 and plain.micro_batches % ranks == 0:
                yield replace(plain, schedule="interleaved_1f1b", chunks_per_rank=chunks, zero_stage=zero_stage)
    if ranks == 1 and partitioned:
        for zero_stage in (2, 3):
            layers = model.layers
            yield replace(
                plain, micro_batch_outer=True, chunks_per_rank=layers, schedule="layered", zero_stage=zero_stage
            )
    for chunks in chunks_per_rank(model, ranks):
        for zero_stage in (0, 1, 2, 3) if partitioned else (0,):
            layered = replace(plain, schedule="layered", chunks_per_rank=chunks, zero_stage=zero_stage)
            for group in _groups(layered):
                yield replace(layered, micro_batch_group=group)
                if zero_stage == 3 and chunks > layered.resident_chunks:
                    # What stays resident is gathered once, and takes memory.
                    yield replace(layered, micro_batch_group=group, resident_chunks=chunks)


def _groups(configuration: Configuration) -> list[int | None]:
    """Returns the micro-batch groups worth a look: all, which moves least, and the smallest equal ones that keep every
    pipeline rank busy, which store least."""
    count = configuration.micro_batches
    smaller = [group for group in divisors(count) if configuration.pipeline_ranks <= group < count]
    return [None, *smaller[:1]]


def chunks_per_rank(model: Model, pipeline_ranks: int) -> list[int]:
    """Returns the numbers of chunks that give every rank equally many layers; the most possible if there are none."""
    even, rest = divmod(model.layers, pipeline_ranks)
    return divisors(even) if rest == 0 else [even]


def tensor_rank_numbers(model: Model, cluster: Cluster) -> list[int]:
    """Returns the numbers of tensor-parallel ranks that divide a node's GPUs, the heads and the matrices."""
    return [
        ranks
        for ranks in divisors(cluster.gpus_per_node)
        if not (model.attention_heads % ranks or model.key_value_heads % ranks or model.feed_forward_size % ranks)
    ]


def divisors(number: int) -> list[int]:
    """Returns the divisors of ``number``, ascending."""
    small = [factor for factor in range(1, int(number**0.5) + 1) if number % factor == 0]
    return small + [number // factor for factor in reversed(small) if factor * factor != number]
