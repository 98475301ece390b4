"""A model of one's own as the layers of a pipeline: any module that calls a list of blocks."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ds_lgamp.config import BLOCK, ConfigError, LgampConfig
from ds_lgamp.integrations.split.call import Arguments, Call, Survey
from ds_lgamp.integrations.split.layers import SplitLayers
from ds_lgamp.integrations.split.outputs import NotReturned
from ds_lgamp.integrations.split.parts import Original, find_blocks, model_of
from ds_lgamp.integrations.split.state import untouched
from ds_lgamp.integrations.split.survey import survey
from ds_lgamp.integrations.split.trial_arguments import given_inputs, inputs_of
from ds_lgamp.runtime.recompute import RandomSource


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
        original = Original(model, find_blocks(model, settings.blocks), random_sources, settings)
        only_loss = original.only_loss
        with untouched(model) as before:
            shown = survey(original, dummy)
            leaves, self._structure = tree_flatten(shown.output)
            self._place = _place_of_loss(type(model).__name__, leaves) if only_loss else None
            self._shape = torch.Size() if self._place is None else leaves[self._place].shape
            self._others = [NotReturned() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            """What the model returns beside its loss, where only that comes back."""
            # They may draw random numbers, but change nothing.
            without_state = [module for module in model.modules() if not [*module.parameters(), *module.buffers()]]
            super().__init__(original, shown, self._loss_in if only_loss else None, before, without_state)
            self._names = list(signature(model_of(model).forward).parameters)
            with original.evaluating(without_state):
                self._for_loss = self._needed_for_loss(shown) if only_loss else []
                """The arguments without which the model returns no loss."""

    def arguments(self, positional: tuple[Any, ...], named: Mapping[str, Any]) -> Arguments:
        """Returns the arguments as they are. Raises ConfigError in training if the model returns no loss for them."""
        model = self._split.original.model
        if self._for_loss and model.training and torch.is_grad_enabled():
            given = {**dict(zip(self._names, positional)), **named}
            for name in self._for_loss:
                if given.get(name) is None:
                    raise ConfigError(
                        f"engine(...) got no '{name}', without which the forward of {type(model).__name__} "
                        f"returns no loss; pass it, or set {BLOCK}.outputs to 'all' if the script computes the loss"
                    )
        return positional, dict(named)

    def _needed_for_loss(self, shown: Survey) -> list[str]:
        """Returns the arguments among those of a small call without which the forward runs, but returns no loss."""
        positional, named = shown.arguments

        def returns_loss(*left_out: str) -> bool:
            given = {name: value for name, value in named.items() if name not in left_out}
            split, call = self._split, Call(positional, given, shown.shapes_before)
            hidden = split.dry_run_without_parts(call)[0].hidden.detach().requires_grad_()
            with torch.enable_grad(), split.original.undisturbed(), split.parts_before.absent(call.shapes):
                return self._loss_in(split.output(call, hidden.clone)) is not None

        def only_lacks_loss(name: str) -> bool:
            # A forward that needs the argument says so itself.
            with suppress(Exception):
                return not returns_loss(name)
            return False

        # The forward of a wrapper does not tell the order of others.
        known = [name for name in self._names if name in named]
        return [*filter(only_lacks_loss, known)] if returns_loss() else []

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
        if structure != self._structure:
            return None
        loss = leaves[self._place]
        return loss if _is_number(loss) and loss.shape == self._shape else None

    def training_output(self, loss: Tensor) -> Any:
        """Returns what the model would return, with the ``loss`` as its only tensor."""
        loss = loss.reshape(self._shape) if self._shape else loss
        leaves = [loss if place == self._place else other for place, other in enumerate(self._others)]
        return tree_unflatten(leaves, self._structure)


def _place_of_loss(name: str, leaves: Sequence[Any]) -> int:
    """Returns which of the leaves of the output of model ``name`` is its loss: the only number with a gradient, or else
    the only such tensor of one element. Raises ConfigError if there is none, or several."""
    numbers = [place for place, leaf in enumerate(leaves) if _is_number(leaf)]
    places = [place for place in numbers if not leaves[place].shape] or numbers
    if len(places) != 1:
        raise ConfigError(
            f"on its dummy inputs the forward of {name} returned {len(places)} numbers with a gradient, but the loss "
            f"is one; set {BLOCK}.outputs to 'all' if the script computes the loss, or {BLOCK}.dummy_inputs to "
            "arguments with which the forward does"
        )
    return places[0]


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.numel() == 1 and leaf.requires_grad
