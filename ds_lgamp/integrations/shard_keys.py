"""The keys of ZeRO that ask for hierarchical shards: ``zero_hpz_partition_size`` and ``mics_shard_size``."""

from collections.abc import Mapping
from typing import Any

HPZ, MICS = "zero_hpz_partition_size", "mics_shard_size"
_REMOVED = (MICS, "mics_hierarchical_params_gather")
"""Keys that DeepSpeed 0.19.8 refuses, because it has removed them."""


def active(config: Mapping[str, Any]) -> dict[str, int]:
    """Returns the keys that ask for hierarchical shards, and their values, without those that switch them off: 0 and 1
    ranks for hpZ, -1 for MiCS."""
    section = config.get("zero_optimization")
    if not isinstance(section, dict):
        return {}
    off = {HPZ: (None, 0, 1), MICS: (None, -1)}
    return {name: section[name] for name, values in off.items() if section.get(name) not in values}


def for_deepspeed(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration for DeepSpeed: without keys that it has removed.

    MiCS over groups of one rank replicates everything, which is stage 0.
    """
    section = config.get("zero_optimization")
    if not isinstance(section, dict) or not section.keys() & set(_REMOVED):
        return config
    kept = {name: value for name, value in section.items() if name not in _REMOVED}
    if section.get(MICS) == 1 and section.get("stage") == 3:
        kept["stage"] = 0
    return {**config, "zero_optimization": kept}
