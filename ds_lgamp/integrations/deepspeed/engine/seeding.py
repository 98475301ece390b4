"""Seeds generators before every layer, where the module or ``"reproducible": true`` asks for it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from deepspeed.runtime import utils as deepspeed_utils

from ds_lgamp.integrations.deepspeed.model.module import BeforeLayer, PlacedModule
from ds_lgamp.runtime.recompute import RandomSource, hashed_seed, undisturbed


def before_layers(
    module: PlacedModule,
    reproducible: bool,
    random_sources: Sequence[RandomSource],
    global_step: Callable[[], int],
) -> BeforeLayer | None:
    """Returns what is called before every layer; None if nothing is.

    The seed that the module asks for wins over that of a reproducible run.

    Args:
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


def kept_from_script(random_sources: Sequence[RandomSource], reproducible: bool) -> AbstractContextManager[None]:
    """Restores the generators after the block if it seeds them all: seeds of layers must not show in what the script
    draws, such as the order of its data."""
    return undisturbed(random_sources) if reproducible else nullcontext()


def _seed_everything(
    module: PlacedModule,
    random_sources: Sequence[RandomSource],
    global_step: Callable[[], int],
    layer: int,
    micro_batch: int,
) -> None:
    kind = "training" if module.training else "evaluation"
    seed = hashed_seed(int(module.base_seed), kind, global_step(), layer, micro_batch, module._grid.data_parallel_id)
    for source in random_sources:
        source.seed(seed)


def _seed_as_stock(module: PlacedModule, layer: int, micro_batch: int) -> None:
    """Uses the seed that stock DeepSpeed's ``PipelineModule.forward`` gives this layer for this micro-batch."""
    seed = module.base_seed * (module.micro_offset + micro_batch + 2) + layer
    (module.seed_fn or deepspeed_utils.set_random_seed)(seed)
