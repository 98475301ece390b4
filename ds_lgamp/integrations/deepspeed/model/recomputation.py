"""The random numbers of layers, and their recomputation: from which generators layers draw, what seeds them before each
layer, and what layers recompute themselves.

With ``"recompute": "selective"``, chunks are not recomputed, but layers that offer it recompute a part of themselves;
with "auto", they do so in some forwards. A layer offers it by an attribute ``recompute_selectively`` of its own or of a
module inside it. The engine sets the attribute to True. The layer itself chooses the part that it recomputes and the
random states for it. Megatron-core's attention has its own switch for this.
"""

import random
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import utils as deepspeed_utils
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.runtime.recompute import RandomSource, default_sources, hashed_seed, undisturbed


def layer_sources(device: torch.device) -> list[RandomSource]:
    """Returns the generators of torch, Python and NumPy, and the trackers of DeepSpeed and Megatron-core that are in
    use."""
    sources = [
        *default_sources(device),
        RandomSource("python", random.getstate, random.setstate, random.seed),
        RandomSource(
            "numpy",
            numpy.random.get_state,
            numpy.random.set_state,
            lambda seed: numpy.random.seed(seed % 2**32),
            _same_numpy,
        ),
    ]
    for name, module in _TRACKING.items():
        tracking = sys.modules.get(module)
        if tracking is not None and tracking.get_cuda_rng_tracker().get_states():
            sources.append(_tracked(name, tracking.get_cuda_rng_tracker(), device))
    return sources


_TRACKING = {
    "deepspeed": "deepspeed.runtime.activation_checkpointing.checkpointing",
    "megatron": "megatron.core.tensor_parallel.random",
}
"""The modules that have a tracker of random states, by what the tracker is called here."""


def _tracked(name: str, tracker: Any, device: torch.device) -> RandomSource:
    """Returns the states of a tracker: tensors, or generators that a CUDA graph can capture."""

    def read() -> dict[str, torch.Tensor]:
        states = tracker.get_states().items()
        return {key: state.get_state() if isinstance(state, torch.Generator) else state for key, state in states}

    def write(states: dict[str, torch.Tensor]) -> None:
        generators = {key: each for key, each in tracker.get_states().items() if isinstance(each, torch.Generator)}
        for key, generator in generators.items():
            generator.set_state(states[key])
        # A new dictionary, because the tracker keeps and changes the one that it gets.
        tracker.set_states({**states, **generators})

    return RandomSource(name, read, write, lambda seed: write(_seeded(read(), seed, device)), _same_tracked)


def _seeded(states: dict[str, torch.Tensor], seed: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Returns a state for every name in ``states``, each from a seed of its own."""
    return {name: torch.Generator(device).manual_seed(hashed_seed(seed, name)).get_state() for name in states}


def _same_numpy(first: Any, second: Any) -> bool:
    return first[2:] == second[2:] and first[1].tobytes() == second[1].tobytes()


def _same_tracked(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


BeforeLayer = Callable[[int, int], None]
"""Called with (layer, micro-batch) before the layer."""


def before_layers(
    module: PipelineModule,
    reproducible: bool,
    random_sources: Sequence[RandomSource],
    global_step: Callable[[], int],
) -> BeforeLayer | None:
    """Returns what is called before every layer; None if nothing is.

    The seed that the module asks for wins over that of a reproducible run.

    Args:
        module: its layers are placed.
        global_step: returns the number of the training step.
    """
    steps = [] if module.before_layer is None else [module.before_layer]
    if reproducible:
        steps.append(partial(_seed_everything, module, random_sources, global_step))
    if module.seed_layers:
        steps.append(partial(_seed_as_stock, module))

    def before_layer(layer: int, micro_batch: int) -> None:
        for step in steps:
            step(layer, micro_batch)

    return before_layer if steps else None


def restoring_random_states(random_sources: Sequence[RandomSource], reproducible: bool) -> AbstractContextManager[None]:
    """Restores the generators after the block if it seeds them all: seeds of layers must not show in what the script
    draws, such as the order of its data."""
    return undisturbed(random_sources) if reproducible else nullcontext()


def _seed_everything(
    module: PipelineModule,
    random_sources: Sequence[RandomSource],
    global_step: Callable[[], int],
    layer: int,
    micro_batch: int,
) -> None:
    kind = "training" if module.training else "evaluation"
    seed = hashed_seed(int(module.base_seed), kind, global_step(), layer, micro_batch, module._grid.data_parallel_id)
    for source in random_sources:
        source.seed(seed)


def _seed_as_stock(module: PipelineModule, layer: int, micro_batch: int) -> None:
    """Uses the seed that stock DeepSpeed's ``PipelineModule.forward`` gives this layer for this micro-batch."""
    seed = module.base_seed * (module.micro_offset + micro_batch + 2) + layer
    (module.seed_fn or deepspeed_utils.set_random_seed)(seed)


SWITCH = "recompute_selectively"
MEGATRON_SWITCH = "checkpoint_core_attention"


def offers_selective(layer: Any) -> bool:
    """Returns whether ``layer``, or a module inside it, can recompute a part of itself."""
    return isinstance(layer, nn.Module) and any(_switch_of(module) is not None for module in layer.modules())


def refuse_unless_offered(offers: Iterable[bool]) -> None:
    """Raises ConfigError if no layer of the model can recompute a part of itself."""
    if not any(offers):
        raise ConfigError(
            f"{BLOCK}.recompute is 'selective', but no layer of the model offers it; give layers an attribute {SWITCH} "
            "that makes them recompute a part of themselves, or use 'full' or 'none'"
        )


def switches_of(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, str]]:
    """Returns the modules that do not yet recompute a part of themselves, each with the attribute that makes it do so.
    A Megatron-core layer stays as it is if its TransformerConfig sets ``recompute_granularity``."""
    switches = []
    for module in modules:
        name = _switch_of(module)
        configured = getattr(getattr(module, "config", None), "recompute_granularity", None) is not None
        if name is not None and not getattr(module, name) and (name == SWITCH or not configured):
            switches.append((module, name))
    return switches


def switch_on(modules: Iterable[nn.Module]) -> None:
    """Makes layers recompute a part of themselves."""
    for module, name in switches_of(modules):
        setattr(module, name, True)


def _switch_of(module: nn.Module) -> str | None:
    if hasattr(module, SWITCH):
        return SWITCH
    # Megatron-core cannot recompute on the CPU, because it reads the random states of a GPU then.
    if hasattr(module, MEGATRON_SWITCH) and get_accelerator().device_name() != "cpu":
        return MEGATRON_SWITCH
    return None


_PACKAGE = "transformer_engine"


def refuse_delayed_scaling(module: nn.Module) -> None:
    """Makes the parts of Transformer Engine in ``module`` raise ConfigError when they are called with delayed scaling.

    Delayed scaling takes its scales from a history of largest values. The end of every autocast moves the histories of
    all parts in the process on. A chunk that is computed again, after other micro-batches, takes other scales than the
    first time, and moves the histories on once more. Recipes without a history depend on the tensor alone. Only a
    forward knows its recipe.
    """
    for part in module.modules():
        if any(kind.__module__.partition(".")[0] == _PACKAGE for kind in type(part).__mro__):
            part.register_forward_pre_hook(_refuse_in_use)


def _refuse_in_use(part: nn.Module, inputs: Any) -> None:
    from transformer_engine.common.recipe import DelayedScaling
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    if FP8GlobalStateManager.is_fp8_enabled() and isinstance(FP8GlobalStateManager.get_fp8_recipe(), DelayedScaling):
        raise ConfigError(
            f"fp8_recipe is DelayedScaling, whose scales depend on the order of work, which a {BLOCK} block changes; "
            "give Transformer Engine's autocast Float8CurrentScaling, MXFP8BlockScaling or Float8BlockScaling"
        )
