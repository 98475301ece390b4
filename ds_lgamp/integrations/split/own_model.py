"""A model of one's own as the layers of a pipeline: any module that calls a list of blocks."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ds_lgamp.config import BLOCK, ConfigError, LgampConfig
from ds_lgamp.integrations.split.blocks import find_blocks
from ds_lgamp.integrations.split.call import Arguments
from ds_lgamp.integrations.split.checks import check_parts
from ds_lgamp.integrations.split.dummy_inputs import given_inputs, inputs_of
from ds_lgamp.integrations.split.layers import SplitLayers
from ds_lgamp.integrations.split.output import NotReturned
from ds_lgamp.integrations.split.snapshot import untouched
from ds_lgamp.integrations.split.survey import evaluating, survey
from ds_lgamp.runtime.random_state import RandomSource


class OwnModelLayers(SplitLayers):
    """The layers of a module that is none of transformers.

    Args:
        model: its forward calls the blocks of a list one after another.
        random_sources: generators that the model may draw from.
        settings: the block.

    Raises ConfigError if the model cannot be split, or returns no loss and should.
    """

    settings = None

    def __init__(self, model: nn.Module, random_sources: Sequence[RandomSource], settings: LgampConfig) -> None:
        given = settings.dummy_inputs
        dummy = inputs_of(model) if given is None else ((), given_inputs(given))
        blocks, only_loss = find_blocks(model, settings.blocks), settings.outputs == "loss"
        with untouched(model):
            shown = survey(model, blocks, dummy, random_sources, only_loss)
            leaves, self._structure = tree_flatten(shown.output)
            self._place = _place_of_loss(type(model).__name__, leaves) if only_loss else None
            self._others = [NotReturned() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            """What the model returns beside its loss, where only that comes back."""
            super().__init__(model, blocks, shown, random_sources, self._loss_in if only_loss else None)
            on_other_ranks = (settings.pipeline_ranks or 1) > 1
            # They may draw random numbers, but change nothing.
            without_state = [module for module in model.modules() if not [*module.parameters(), *module.buffers()]]
            with evaluating(model, blocks, without_state):
                check_parts(self._split, shown, random_sources, on_other_ranks)
            self.compare(model, blocks, shown, random_sources, on_other_ranks)

    @staticmethod
    def arguments(positional: tuple[Any, ...], named: Mapping[str, Any]) -> Arguments:
        return positional, dict(named)

    def loss_of(self, output: Any) -> Tensor:
        """Returns the loss in the model's output. Raises ConfigError if the output is another one than that for the
        dummy inputs."""
        loss = self._loss_in(output)
        if loss is None:
            raise ConfigError(
                "the model returned something else than for its dummy inputs, where its output had a loss; set "
                f"{BLOCK}.dummy_inputs to arguments such as the script's, or {BLOCK}.outputs to 'all'"
            )
        return loss

    def _loss_in(self, output: Any) -> Tensor | None:
        leaves, structure = tree_flatten(output)
        assert self._place is not None, "the model returns its loss"
        return leaves[self._place] if structure == self._structure and _is_loss(leaves[self._place]) else None

    def training_output(self, loss: Tensor) -> Any:
        """Returns what the model would return, with the ``loss`` as its only tensor."""
        leaves = [loss if place == self._place else other for place, other in enumerate(self._others)]
        return tree_unflatten(leaves, self._structure)


def _place_of_loss(name: str, leaves: Sequence[Any]) -> int:
    """Returns which of the leaves of the output of model ``name`` is its loss: the only number with a gradient. Raises
    ConfigError if there is none, or several."""
    places = [place for place, leaf in enumerate(leaves) if _is_loss(leaf)]
    if len(places) != 1:
        raise ConfigError(
            f"on its dummy inputs the forward of {name} returned {len(places)} numbers with a gradient, but the loss "
            f"is one; set {BLOCK}.outputs to 'all' if the script computes the loss, or {BLOCK}.dummy_inputs to "
            "arguments with which the forward does"
        )
    return places[0]


def _is_loss(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim == 0 and leaf.requires_grad
