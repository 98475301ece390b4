"""Sequences that several ranks share by DeepSpeed's Ulysses (arXiv 2506.13996): every rank of such a group gets a part
of each sequence, and attention exchanges parts for heads. The script passes an ``mpu`` that knows these groups, which
``UlyssesSPAttentionHF.register_with_transformers`` returns."""

from typing import Any

import torch.distributed as dist

from ds_lgamp.config import BLOCK, ConfigError, LgampConfig

KEY = "sequence_parallel_size"


def sequence_ranks(mpu: Any) -> int:
    """Returns how many ranks share a sequence: 1 if ``mpu`` is that of a pipeline, or None."""
    # As DeepSpeed's configuration, which takes an mpu without data-parallel ranks for one of Ulysses.
    if mpu is None or hasattr(mpu, "get_data_parallel_world_size"):
        return 1
    return int(mpu.get_sequence_parallel_world_size())


def feeding_ranks(mpu: Any) -> int:
    """Returns how many ranks feed sequences of their own, as DeepSpeed's batch sizes count them."""
    if hasattr(mpu, "get_data_parallel_world_size"):
        return int(mpu.get_data_parallel_world_size())
    return dist.get_world_size() // sequence_ranks(mpu)


def check_key(config: dict[str, Any], mpu: Any) -> None:
    """Raises ConfigError if the configuration and the ``mpu`` differ in how many ranks share a sequence."""
    size = config.get(KEY)
    if size not in (None, sequence_ranks(mpu)):
        raise ConfigError(
            f"{KEY} is {size}, but deepspeed.initialize got no mpu by which {size} ranks share a sequence; pass that "
            "of UlyssesSPAttentionHF.register_with_transformers, or remove the key, which is not for a PipelineModule"
        )


def check_layout(mpu: Any, of_pipelines: Any, settings: LgampConfig) -> None:
    """Raises ConfigError if the script does not get what it needs for the loss of a sequence, or if ranks share a
    sequence that hold different layers.

    Args:
        mpu: what the script has passed.
        of_pipelines: the mpu of the pipelines that train the model.
        settings: the block.
    """
    ranks = sequence_ranks(mpu)
    if ranks == 1:
        return
    if settings.outputs != "all":
        raise ConfigError(
            f"{ranks} ranks share a sequence, whose loss only the script can compute; set {BLOCK}.outputs to 'all'"
        )
    sharing, data_ranks = (
        set(dist.get_process_group_ranks(group))
        for group in (mpu.get_sequence_parallel_group(), of_pipelines.get_data_parallel_group())
    )
    if not sharing <= data_ranks:
        raise ConfigError(
            f"{ranks} ranks share a sequence, but are not among the {len(data_ranks)} data-parallel ranks that hold "
            f"the same layers; use a {KEY} that divides {len(data_ranks)}, or fewer {BLOCK}.pipeline_ranks"
        )
