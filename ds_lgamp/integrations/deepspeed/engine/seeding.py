"""Seeds generators ahead of layers, where the module or ``"reproducible": true`` asks for it."""

from collections.abc import Callable, Sequence
from functools import partial

from deepspeed.runtime import utils as deepspeed_utils

from ds_lgamp.integrations.deepspeed.model.module import PlacedModule
from ds_lgamp.runtime.random_state import RandomSource
from ds_lgamp.runtime.reproducible import hashed_seed

SeedLayer = Callable[[int, int], None]
"""Called with (layer, micro-batch) ahead of the layer."""


def layer_seeding(
    module: PlacedModule,
    reproducible: bool,
    random_sources: Sequence[RandomSource],
    data_rank: int,
    global_step: Callable[[], int],
) -> SeedLayer | None:
    """Returns what seeds the generators ahead of a layer; None if nothing does.

    The seed that the module asks for wins over that of a reproducible run.

    Args:
        global_step: returns the number of the training step.
    """
    seed_as_stock = partial(_seed_as_stock, module) if module.seed_layers else None
    if not reproducible:
        return seed_as_stock

    def seed_everything(layer: int, micro_batch: int) -> None:
        kind = "training" if module.training else "evaluation"
        seed = hashed_seed(int(module.base_seed), kind, global_step(), layer, micro_batch, data_rank)
        for source in random_sources:
            source.seed(seed)
        if seed_as_stock is not None:
            seed_as_stock(layer, micro_batch)

    return seed_everything


def _seed_as_stock(module: PlacedModule, layer: int, micro_batch: int) -> None:
    """Uses the seed that stock DeepSpeed's ``PipelineModule.forward`` gives this layer for this micro-batch."""
    seed = module.base_seed * (module.micro_offset + micro_batch + 2) + layer
    (module.seed_fn or deepspeed_utils.set_random_seed)(seed)
