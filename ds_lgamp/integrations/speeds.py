"""Fills in the speeds that a cluster file knows and the block leaves out."""

from typing import Any

from ds_lgamp.config import BLOCK
from ds_lgamp.cost.assignment import Assignment


def with_speeds(config: dict[str, Any], assignment: Assignment | None, replicas: bool = True) -> dict[str, Any]:
    """Returns the configuration with ``pipeline_rank_speeds`` and ``data_rank_speeds`` in its block.

    Keys that stand there already stay. None is added for ranks of equal speeds, nor where another key of the block
    excludes it: ``layers_per_chunk`` sizes the chunks itself, and neither groups of micro-batches nor interleaved 1F1B
    take unequal numbers of them at every stage.

    Args:
        assignment: of ranks to the nodes of a cluster; None if there is no cluster file.
        replicas: whether the engine can give data-parallel ranks unequal numbers of micro-batches.
    """
    block = config.get(BLOCK)
    if assignment is None or not isinstance(block, dict):
        return config
    pipeline, data = work_speeds(assignment)
    added = {}
    if len(set(pipeline)) > 1 and "layers_per_chunk" not in block:
        added["pipeline_rank_speeds"] = pipeline
    in_one_group = block.get("micro_batch_group", "all") == "all" and block.get("schedule") != "interleaved_1f1b"
    if len(set(data)) > 1 and replicas and in_one_group:
        added["data_rank_speeds"] = data
    return {**config, BLOCK: {**added, **block}}


def work_speeds(assignment: Assignment) -> tuple[list[float], list[float]]:
    """Returns the speeds by which pipeline ranks share layers, and data-parallel ranks micro-batches.

    A pipeline rank is as fast as its slowest GPU. A data-parallel rank is as fast as its slowest GPU beside the others
    of the same pipeline rank, because the layers make up for the rest. If each GPU's speed is a product of the two, all
    finish at the same time.
    """
    pipeline = list(assignment.pipeline_speeds)
    data = [
        min(
            assignment.gpu_speeds[assignment.rank(pipeline_rank, data_rank, tensor_rank)] / speed
            for pipeline_rank, speed in enumerate(pipeline)
            for tensor_rank in range(assignment.tensor_ranks)
        )
        for data_rank in range(assignment.data_ranks)
    ]
    return pipeline, data
