"""Checks the keys of ds_config.json beside an enabled ``ds_lgamp`` block, before anything is built from them."""

import math
import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any, NamedTuple

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.deepspeed.config.keys import KEYS, VALUES, Key, Treatment
from ds_lgamp.integrations.program_spec import MICS, shard_groups

_ROWS = {key.name: key for key in KEYS}
_ALIASES = {"bfloat16": "bf16"}
"""Sections by the old name under which DeepSpeed still reads them."""
_AUTO_IS_A_VALUE = {
    "data_types.keep_in_fp32_modules",
    "pipeline.stages",
    *(
        f"expert_parallel.{name}"
        for name in "score_apply combine_impl row_weighting_impl score_func top_k routed_scaling_factor".split()
    ),
}
"""Keys whose value "auto" DeepSpeed itself understands. Elsewhere Hugging Face's Trainer replaces "auto" by a value."""
_DROPS_AUTO = ("zero_optimization", "fp16", "bf16", "bfloat16")
"""Sections from which DeepSpeed itself drops keys that are "auto", as its DeepSpeedConfigModel does."""
_SWITCHES = {"enabled", "device", "autotp_size", "deepcompile"}
"""Last parts of keys that switch their section on. If such a key is refused, the rest of its section does nothing."""
_TYPO = 0.8
"""How similar, from 0 to 1, an unknown key at the top must be to a known key to count as a typo of it. Less similar
ones are the user's own keys."""
_SIMILAR = 0.6
"""The same inside a section, where users have no keys of their own."""
_EIGHT_AND_FOUR_BITS = re.compile("fp(8|4)|float(8|4)", re.IGNORECASE)
"""Names that ask for a precision which no key of DeepSpeed switches on."""
WEIGHTS, FROZEN, GRADIENTS = QUANTISED = (
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
)
"""The keys of zero_optimization that let weights and gradients travel rounded."""
_OURS_ALONE = (MICS, "mics_hierarchical_params_gather", *QUANTISED)
"""Keys of zero_optimization that DeepSpeed does not get. It has removed the first two, and refuses them. For some of
the others, it would make groups of its own."""
_SHOWN = 60
_BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


class _Setting(NamedTuple):
    """A key to which the user gave a value.

    Args:
        name: the key as the user wrote it.
        key: its row in the table.
    """

    name: str
    key: Key
    value: Any


def check_keys(config: dict[str, Any]) -> list[str]:
    """Checks every key, and returns the keys that are set but mean nothing with a ``ds_lgamp`` block, in the order of
    the table. Keys beside a switch that is off are left out, because they mean nothing in DeepSpeed either.

    Raises ConfigError for the first key, in the order of the configuration, that is refused, looks like a typo or is
    "auto".
    """
    meaningless: dict[str, Key] = {}
    config = as_deepspeed_reads(config)
    for setting in _settings(config):
        takes = setting.key.takes
        if takes and not VALUES[takes](setting.value):
            raise ConfigError(f"{setting.name} is {_short(setting.value)}; write {takes}")
        if setting.key.treatment is Treatment.MEANINGLESS:
            if not _has_switch(setting.key.name) and not _is_beside_off(setting.key.name, config):
                meaningless[setting.name] = setting.key
        elif not _passes(setting.key, setting.value):
            raise ConfigError(_complaint(setting))
    sharding = [f"zero_optimization.{key}" for key in shard_groups(config)]
    if sharding and config["zero_optimization"].get("stage") == 3:
        sharding = []
    meaningless |= {name: _ROWS[name] for name in (*sharding, *_paths_without_disk(config))}
    halves = [name for name in ("fp16", "bf16", "bfloat16") if (config.get(name) or {}).get("enabled")]
    if len(halves) > 1 and halves[0] == "fp16":
        raise ConfigError(f"fp16.enabled and {halves[1]}.enabled are True; set one of them to false")
    if config.get("wall_clock_breakdown") and config.get("steps_per_print") is None:
        raise ConfigError("wall_clock_breakdown is True, but steps_per_print is missing; write how often it is printed")
    return sorted(meaningless, key=lambda name: KEYS.index(meaningless[name]))


def without_auto(config: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Returns ``config`` without the keys that are "auto", for which transformers' Trainer and Accelerate fill in
    values."""
    values = {}
    for key, value in config.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, dict) and name != BLOCK:
            value = without_auto(value, name)
        if value != "auto" or name in _AUTO_IS_A_VALUE:
            values[key] = value
    return values


def as_deepspeed_reads(config: dict[str, Any]) -> dict[str, Any]:
    """Returns ``config`` without the keys that DeepSpeed drops, so that their defaults hold: OpenRLHF writes "auto"."""
    sections = {name: config[name] for name in _DROPS_AUTO if isinstance(config.get(name), dict)}
    return {**config, **{name: without_auto(section, name) for name, section in sections.items()}}


def for_deepspeed(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration for DeepSpeed: without keys that it has removed, or that ds_lgamp alone heeds.

    MiCS over groups of one rank replicates everything, which is stage 0.
    """
    section = config.get("zero_optimization")
    if not isinstance(section, dict) or not section.keys() & set(_OURS_ALONE):
        return config
    known = {name: value for name, value in section.items() if name not in _OURS_ALONE}
    if section.get(MICS) == 1 and section.get("stage") == 3:
        known["stage"] = 0
    return {**config, "zero_optimization": known}


def check_batch_sizes(config: dict[str, Any], data_ranks: int) -> None:
    """Raises ConfigError where the three batch sizes, whole numbers each, do not multiply."""
    total, micro, steps = (config.get(key) for key in _BATCH_SIZES)
    if total is None and micro is None:
        raise ConfigError(f"{_BATCH_SIZES[0]} and {_BATCH_SIZES[1]} are missing; write at least one of them")
    if total is None:
        return
    factors = {_BATCH_SIZES[1]: micro, _BATCH_SIZES[2]: steps, "data-parallel ranks": data_ranks}
    given = {name: factor for name, factor in factors.items() if factor is not None}
    product = math.prod(given.values())
    words = " x ".join(f"{factor} ({name})" for name, factor in given.items())
    if total % product or (len(given) == len(factors) and total != product):
        raise ConfigError(
            f"{_BATCH_SIZES[0]} is {total}, which is {'not' if len(given) == 3 else 'no multiple of'} {words} = "
            f"{product}; change one of them"
        )


def _settings(
    section: dict[str, Any], name: str = "", path: str = "", rest: _Setting | None = None
) -> Iterator[_Setting]:
    """Yields the keys of a section that have a value. A section that is refused as a whole counts as one key.

    Args:
        name: the section as the user wrote it; "" for the whole configuration.
        path: the section's name in the table.
        rest: the setting that keys without a row of their own belong to; None if such keys are unknown.
    """
    if f"{path}.*" in _ROWS:
        rest = _Setting(name, _ROWS[f"{path}.*"], section)
    known = _members(path)
    for member, value in section.items():
        member_name = f"{name}.{member}" if name else str(member)
        member_path = f"{path}.{member}" if path else _ALIASES.get(member, str(member))
        if member not in known:
            if rest is None:
                _refuse_low_precision(member_name, value)
                _refuse_typo(str(member), member_name, known, is_top=not path)
            elif value is not None:
                yield rest
            continue
        if value is None and (member_path in _ROWS or path):
            continue
        if member_path in _ROWS:
            _refuse_auto(value, member_name, member_path)
            yield _Setting(member_name, _ROWS[member_path], value)
        elif _refused_whole(member_path):
            yield _Setting(member_name, _ROWS[f"{member_path}.*"], value)
        elif isinstance(value, dict):
            yield from _settings(value, member_name, member_path, rest)
        elif not (member_path == "zero_optimization" and isinstance(value, bool)):
            raise ConfigError(f"{member_name} is {_short(value)}; it must be an object such as {{}}")


def _members(path: str) -> set[str]:
    """The keys and sections that the table has inside a section."""
    prefix = f"{path}." if path else ""
    names = {key.name.removeprefix(prefix).split(".")[0] for key in KEYS if key.name.startswith(prefix)}
    return names - {"*"}


def _refused_whole(path: str) -> bool:
    row = _ROWS.get(f"{path}.*")
    return row is not None and row.treatment is Treatment.REFUSED


def _has_switch(name: str) -> bool:
    """Whether a refused key switches this key's section, or a section around it, on."""
    sections = name.split(".")[:-1]
    rows = [
        _ROWS.get(".".join([*sections[:depth], switch]))
        for depth in range(1, len(sections) + 1)
        for switch in _SWITCHES
    ]
    return any(row is not None and row.treatment is Treatment.REFUSED for row in rows)


def _is_beside_off(name: str, config: dict[str, Any]) -> bool:
    """Whether the key is beside a ``device`` of offloading that is missing or "none"."""
    section = name.rpartition(".")[0]
    if f"{section}.device" not in _ROWS:
        return False
    for part in section.split("."):
        config = config.get(part) or {}
    return config.get("device") in (None, "none")


def _paths_without_disk(config: dict[str, Any]) -> list[str]:
    """Returns the keys that name a folder on a disk where nothing lies there."""
    zero = config.get("zero_optimization")
    given = zero if isinstance(zero, dict) else {}
    sections = {name: given.get(name) or {} for name in ("offload_optimizer", "offload_param")}
    return [
        f"zero_optimization.{name}.nvme_path"
        for name, section in sections.items()
        if section.get("device") == "cpu" and section.get("nvme_path") is not None
    ]


def _passes(key: Key, value: Any) -> bool:
    if key.treatment is Treatment.HONOURED:
        return not key.harmless or value in key.harmless
    if isinstance(value, str):
        value = value.lower()
    if key.name.endswith(".*") and isinstance(value, dict):
        return value.get("enabled") is False
    return value in key.harmless


def _complaint(setting: _Setting) -> str:
    start = f"{setting.name} is {_short(setting.value)}"
    if setting.key.treatment is Treatment.HONOURED:
        return f"{start}, but {BLOCK} takes {setting.key.note}; use one of them or remove it"
    return f"{start}: {setting.key.note}"


def _refuse_typo(key: str, name: str, known: set[str], is_top: bool) -> None:
    if key == BLOCK:
        raise ConfigError(f"{name} is the block in the wrong place; it stands at the top, beside zero_optimization")
    nearest = get_close_matches(key, sorted(known), n=1, cutoff=_TYPO if is_top else _SIMILAR)
    if nearest:
        ending = "Rename it if it is a key of your own" if is_top else "Or remove it"
        raise ConfigError(f"{name} is no known key; did you mean {nearest[0]}? {ending}")
    if not is_top:
        raise ConfigError(f"{name} is no known key; remove it")


def _refuse_low_precision(name: str, value: Any) -> None:
    """Raises ConfigError for a key that is on and asks for 8 or 4 bits. DeepSpeed ignores it, and trains with more."""
    is_on = value.get("enabled") is not False if isinstance(value, dict) else value not in (None, False)
    if is_on and _EIGHT_AND_FOUR_BITS.search(name):
        raise ConfigError(
            f"{name} is {_short(value)}, but DeepSpeed has no such key and would train in bf16, fp16 or fp32; remove "
            "it, or rename it if it is a key of your own"
        )


def _refuse_auto(value: Any, name: str, path: str) -> None:
    """Raises ConfigError for "auto". Searches the parameters of optimizers and schedulers too, but not the block, which
    has its own checks."""
    if path == BLOCK or path in _AUTO_IS_A_VALUE:
        return
    if isinstance(value, dict):
        for member, inner in value.items():
            _refuse_auto(inner, f"{name}.{member}", f"{path}.{member}")
    elif value == "auto":
        raise ConfigError(f'{name} is "auto", which only Hugging Face\'s Trainer fills in; write a value or remove it')


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
