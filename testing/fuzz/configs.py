"""Mutated blocks and DeepSpeed configurations: a step of training with the right loss, or a refusal in a sentence."""

import contextlib
import copy
import io
import math
import os
import tempfile
import traceback
from pathlib import Path
from random import Random
from typing import Any

from testing.fuzz.outcome import Outcome, sentence_fault

LAYERS, WIDTH = 4, 6
MOST_MICRO_BATCHES = 32
"""Steps of more are not trained."""

BLOCK: dict[str, tuple[Any, ...]] = {
    "schedule": ("layered", "interleaved_1f1b", "1f1b", "gpipe"),
    "placement": ("modular", "contiguous"),
    "chunks_per_rank": (1, 2, 4),
    "layers_per_chunk": (1, 2, 3),
    "micro_batch_group": ("all", 1, 2, 5),
    "resident_chunks": (1, 2, 3, 100),
    "defer_gathers": (True, False),
    "overlap_update": (True, False),
    "recompute": ("full", "none", "auto"),
    "recompute_memory": ("1 kB", "1 GB", "much"),
    "split_backward": (True, 2),
    "compile": (False, {"backend": "eager"}),
    "loss_chunk": ("auto", 0, 3),
    "offload_activations": ("none", "cpu"),
    "regather": ("network", "host"),
    "reproducible": (True, False),
    "nonfinite": ("skip", "abort", "report"),
    "data_rank_speeds": ([1.0], [2]),
    "pipeline_rank_speeds": ([1.0],),
    "keep_last": (1, 3),
}
SECTIONS: dict[str, tuple[Any, ...]] = {
    "gradient_accumulation_steps": (1, 2, 3),
    "train_micro_batch_size_per_gpu": (1, 4),
    "gradient_clipping": (0.0, 0.5, 1),
    "zero_optimization": (
        {"stage": 0},
        {"stage": 1},
        {"stage": 2, "overlap_comm": True},
        {"stage": 3, "stage3_max_live_parameters": 1e9},
        {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
        {"stage": 1, "reduce_bucket_size": 5e8},
    ),
    "bf16": ({"enabled": True}, {"enabled": False}, {"enabled": True, "check_grad_overflow": False}),
    "fp16": ({"enabled": False}, {"enabled": True, "loss_scale": 0}),
    "optimizer": (
        {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}},
        {"type": "Lamb", "params": {"lr": 0.01}},
    ),
    "scheduler": (
        {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}},
        {"type": "WarmupDecayLR", "params": {"total_num_steps": 10}},
    ),
    "data_types": ({"grad_accum_dtype": "fp32"}, {"grad_accum_dtype": "bf16"}),
    "communication_data_type": ("fp32", "bf16", "fp16"),
    "steps_per_print": (1, 10),
    "wall_clock_breakdown": (False,),
    "prescale_gradients": (False, True),
    "zero_allow_untested_optimizer": (True, False),
    "activation_checkpointing": ({"partition_activations": False}, {"number_checkpoints": 2}),
    "seed": (1,),
}
_WRITE_OR_CALL = ("tensorboard", "wandb", "csv_monitor", "comet", "autotuning", "nebula", "datastates", "aio")
"""Sections that write files or call servers."""
STRANGE: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 7, 1.5, 2**40, -(2**63), 1e308, 1e-308, math.nan, math.inf, -math.inf,
    "", "auto", "true", "1", "cpu", "x" * 300, "\n", [], [1], [None], [[]],
    {}, {"a": 1}, {"enabled": True}, {"stage": 3},
)  # fmt: skip
"""Values that stand in for others."""


def random_config(random: Random) -> dict[str, Any]:
    """Returns a configuration with up to four faults."""
    config: dict[str, Any] = {
        key: copy.deepcopy(random.choice(values))
        for key, values in SECTIONS.items()
        if random.random() < (0.9 if key in ("zero_optimization", "gradient_accumulation_steps") else 0.12)
    }
    config.setdefault("train_micro_batch_size_per_gpu", 4)
    config["ds_lgamp"] = {
        key: copy.deepcopy(random.choice(values)) for key, values in BLOCK.items() if random.random() < 0.1
    }
    for _ in range(random.choice((0, 1, 1, 1, 2, 4))):
        mutate(random, config)
    return config


def mutate(random: Random, config: dict[str, Any]) -> None:
    """Changes one entry of ``config`` at any depth."""
    level: dict[str, Any] = config
    if random.random() < 0.6 and isinstance(config.get("ds_lgamp"), dict):
        level = config["ds_lgamp"]
    while True:
        inner = [value for value in level.values() if isinstance(value, dict) and value]
        if not inner or random.random() < 0.6:
            break
        level = random.choice(inner)
    act = random.choice(("set", "set", "set", "remove", "misspell", "add", "known"))
    if act == "known":
        set_known(random, config)
        return
    if act == "add" or not level:
        known = BLOCK if level is config.get("ds_lgamp") else SECTIONS
        level[random.choice((*known, "stage", "enabled", "type", "params", "unknown"))] = random.choice(STRANGE)
        return
    key = random.choice(list(level))
    if act == "set":
        level[key] = copy.deepcopy(random.choice(STRANGE))
    elif act == "remove":
        del level[key]
    else:
        place = random.randrange(len(key))
        level[key[:place] + key[place + 1 :] or "x"] = level.pop(key)


def set_known(random: Random, config: dict[str, Any]) -> None:
    """Sets a key that DeepSpeed knows, with its section."""
    from ds_lgamp.integrations.deepspeed.config.keys import KEYS

    names = [key.name for key in KEYS if "*" not in key.name and not key.name.startswith(_WRITE_OR_CALL)]
    *outer, last = random.choice(names).split(".")
    level: Any = config
    for key in outer:
        level = level.setdefault(key, {}) if isinstance(level, dict) else None
    if isinstance(level, dict):
        level[last] = copy.deepcopy(random.choice(STRANGE))


def run_cases(first: int, count: int, progress: str) -> list[tuple[int, Outcome]]:
    """Runs cases on the only rank of a job. Writes the number of the current case to the file ``progress``."""
    import deepspeed  # noqa: F401 as scripts do, before ds_lgamp

    import ds_lgamp
    from testing.deepspeed_rank import prepare_rank

    prepare_rank()
    ds_lgamp.install()
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        # A configuration may name files.
        os.chdir(folder)
        for case in range(first, first + count):
            Path(progress).write_text(str(case))
            outcomes.append((case, run_case(random_config(Random(case)))))
        os.chdir("/")
    return outcomes


def run_case(config: dict[str, Any]) -> Outcome:
    """Initialises an engine with ``config`` and trains a step."""
    from ds_lgamp.config import ConfigError

    engine = None
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            engine, data, expected = _initialised(copy.deepcopy(config))
            if data is None:
                return Outcome("accepted")
            loss = engine.train_batch(iter(data)).item()
    except ConfigError as error:
        fault = sentence_fault(str(error))
        return Outcome("refused") if fault is None else Outcome(f"defect: {fault}", f"{config}: {error}")
    except Exception:
        without = {key: value for key, value in config.items() if key != "ds_lgamp"}
        # DeepSpeed may fail before anybody looks at the block.
        if without == config or run_case(without).kind == "stock DeepSpeed's error":
            return Outcome("stock DeepSpeed's error")
        return Outcome("defect: error", f"{config}\n{traceback.format_exc(limit=-4)}")
    finally:
        if engine is not None:
            with contextlib.redirect_stdout(printed):
                engine.destroy()
    if not math.isclose(loss, expected, rel_tol=0.05 if engine.bfloat16_enabled() else 1e-4):
        return Outcome("defect: another loss", f"{config}: {loss} instead of {expected}")
    return Outcome("trained")


def _has_block(config: dict[str, Any]) -> bool:
    from ds_lgamp.config import read_block

    return read_block(config) is not None


def _initialised(config: dict[str, Any]) -> tuple[Any, list[Any] | None, float]:
    """Returns the engine, a batch for it, and the loss of that batch in one process without DeepSpeed. There is no
    batch if it is too large to train."""
    import deepspeed
    import torch
    from deepspeed.pipe import LayerSpec, PipelineModule
    from torch import nn

    def mean_square(output: Any, target: Any) -> Any:
        return ((output - target) ** 2).float().mean()

    torch.manual_seed(0)
    module = PipelineModule([LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(LAYERS)], 1, loss_fn=mean_square)
    alone = copy.deepcopy(nn.Sequential(*module.forward_funcs))
    optimizer = None if config.get("optimizer") is not None else torch.optim.SGD(module.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]
    if not _has_block(config) or engine.micro_batches > MOST_MICRO_BATCHES:
        return engine, None, 0.0
    kind = next(module.parameters()).dtype
    data = [(torch.randn(4, WIDTH), torch.zeros(4, WIDTH)) for _ in range(engine.micro_batches)]
    expected = sum(mean_square(alone(inputs), labels).item() for inputs, labels in data) / len(data)
    return engine, [(inputs.to(kind), labels) for inputs, labels in data], expected
