"""A model as the layers of a pipeline: what precedes its blocks, the blocks, and what follows them."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ds_lgamp.config import BLOCK, ConfigError, LgampConfig
from ds_lgamp.integrations.split.call import Arguments, BatchCalls, Call, Survey
from ds_lgamp.integrations.split.comparison import Comparison, largest_token
from ds_lgamp.integrations.split.forward import SplitForward
from ds_lgamp.integrations.split.outputs import NotReturned
from ds_lgamp.integrations.split.parts import (
    Original,
    Part,
    Sides,
    Tree,
    find_blocks,
    model_of,
    modules_in,
    own_parameters,
    parameters_of,
    place_of,
)
from ds_lgamp.integrations.split.state import Snapshot, untouched
from ds_lgamp.integrations.split.survey import survey
from ds_lgamp.integrations.split.trials import (
    check_foreign,
    check_parts,
    check_travels,
    given_inputs,
    inputs_of,
    results_after,
)
from ds_lgamp.runtime.chunk import Tensors, as_tuple
from ds_lgamp.runtime.compiled import Compiler
from ds_lgamp.runtime.recompute import RandomSource

logger = logging.getLogger(__name__)


class Beginning(Tree):
    """What precedes the blocks, such as embeddings. Takes a call, returns hidden states and what travels with them."""

    def __init__(self, parts: Mapping[str, Part], split: SplitForward) -> None:
        super().__init__(parts)
        self._split = split

    def forward(self, call: Call) -> Tensors:
        return together(*self._split.begin(call))


class Block(Tree):
    """A block of the model. Takes and returns hidden states, with what the next layers need besides them."""

    def __init__(self, path: str, block: nn.Module, index: int, split: SplitForward, calls: BatchCalls) -> None:
        super().__init__({path: block})
        self._index, self._split, self._calls = index, split, calls

    def forward(self, inputs: Tensors) -> Tensors:
        hidden, *others = as_tuple(inputs)
        return together(*self._split.run_block(self._index, self._calls, hidden, others))


class End(Tree):
    """What follows the blocks. Takes hidden states, with what travels with them, returns the model's output. If it
    shares parameters with what precedes the blocks, it is that, too."""

    def __init__(self, parts: Mapping[str, Part], split: SplitForward, calls: BatchCalls) -> None:
        super().__init__(parts)
        self._split, self._calls = split, calls

    def forward(self, inputs: Call | Tensors) -> Any:
        if isinstance(inputs, Call):
            return together(*self._split.begin(inputs))
        hidden, *travels = as_tuple(inputs)
        return self._split.finish(self._calls.current, hidden, travels)


class Layers:
    """A model as layers."""

    calls: BatchCalls
    """The calls of the batch."""
    modules: Sequence[nn.Module]
    """The layers in their order. Only the first and the last may be the same module: then they share parameters."""
    partition_method: str
    """How the layers are cut into parts of equal weight, in the words of PipelineModule."""
    settings: Any = None
    """What a forward sets in the model's configuration, as of transformers; None if the model has none."""

    @property
    def sums(self) -> tuple[int, int]:
        """The bytes that travel beside the hidden states of a micro-batch for what hosts collect, forward and back."""
        return 0, 0

    @property
    def compiled(self) -> Iterable[nn.Module]:
        """The modules that :meth:`compile` compiles."""
        raise NotImplementedError

    def check_blocks(self) -> None:
        """Raises ConfigError if the script has put something else in the place of a layer, or tied weights."""

    def arguments(self, positional: tuple[Any, ...], named: Mapping[str, Any]) -> Arguments:
        """Returns the arguments with which the model is called if the script passes these. Raises ConfigError if the
        model does not take them, or, in training, if it returns no loss for them and should."""
        raise NotImplementedError

    def first_input(self, call: Call) -> Any:
        """Returns what the first layer takes."""
        return call

    def loss_of(self, output: Any) -> Tensor:
        """Returns the loss in what the last layer returned. Raises ConfigError if there is none."""
        raise NotImplementedError

    def training_output(self, loss: Tensor) -> Any:
        """Returns what the engine returns for a call in training."""
        return loss

    def compile(self, **options: Any) -> None:
        """Compiles what the layers compute with torch.compile's ``options``."""
        compiler = Compiler(options)
        for module in self.compiled:
            compiler(module)


def _ties(model: nn.Module) -> int:
    """Returns how many names of parameters are second names."""
    named = [*map(id, own_parameters(modules_in(model)))]
    return len(named) - len({*named})


def _refuse_gradient_hooks(sides: Sides) -> None:
    """Raises ConfigError if a parameter with a hook of its gradient may be used before the blocks and after them."""
    for path, part in sides.before.items():
        if any(parameter._backward_hooks for parameter in parameters_of([part])):
            raise ConfigError(
                f"a parameter of '{path}' has a hook (register_hook) and is shared by what precedes and what follows "
                f"the blocks, but a {BLOCK} block computes its gradient in two parts; change gradients elsewhere, or "
                "untie the parameter"
            )


class SplitLayers(Layers):
    """The layers of a model that calls its blocks one after another.

    Args:
        loss_in: returns the loss in an output, if nothing else there has gradients.
        before: what the model held before all forwards.
        training: modules that train in checks, because they change nothing.

    Raises ConfigError if a layer would need what other ranks lack, or if the layers compute something else than the
    model. See :mod:`ds_lgamp.integrations.split.trials` and :class:`Comparison`.
    """

    def __init__(
        self,
        original: Original,
        shown: Survey,
        loss_in: Callable[[Any], Any] | None,
        before: Snapshot,
        training: Sequence[nn.Module] = (),
    ) -> None:
        blocks = original.blocks
        self.calls, self.partition_method = BatchCalls(), f"type:^{Block.__name__}$"
        self._split = split = SplitForward(original, shown, loss_in)
        with original.evaluating():
            if original.on_several_ranks:
                # Raises if ranks without the parts before the blocks cannot know the shapes of what these return.
                with torch.no_grad():
                    split.dry_run_without_parts(Call(*shown.arguments))
            split.travelling.add(*results_after(split, shown))
            if shown.travels_to_blocks or shown.travels_to_output:
                check_travels(split, shown)
        own_blocks = [
            Block(f"{blocks.path}.{name}", block, index, split, self.calls)
            for index, (name, block) in enumerate(blocks.named.items())
        ]
        self._blocks, self._ties_before = blocks.named, _ties(original.model)
        sides = split.sides
        if sides.are_shared:
            _refuse_gradient_hooks(sides)
        end = End(sides.of_last_layer, split, self.calls)
        self.modules = [end if sides.are_shared else Beginning(sides.before, split), *own_blocks, end]
        with original.evaluating(training):
            check_parts(split, shown, largest_token(original.model))
        try:
            with original.evaluating():
                check_foreign(split, shown)
                Comparison(split, self.modules, self.calls).check(shown.arguments)
        finally:
            self.calls.forget()
        self._warn_of_attributes(before)

    def check_blocks(self) -> None:
        model, (path, container) = self._split.original.model, self._split.original.blocks
        for name, block in self._blocks.items():
            holder, key = place_of(container, name)
            if holder.get(key) is not block:
                raise ConfigError(
                    f"block '{path}.{name}' of the model was replaced, moved or removed after "
                    f"deepspeed.initialize, but a {BLOCK} block trains those that the model had; change them before"
                )
        if _ties(model) > self._ties_before:
            raise ConfigError(
                f"parameters of the {type(model).__name__} were tied after deepspeed.initialize, but a {BLOCK} block "
                "trains them one by one; tie them before"
            )

    def _warn_of_attributes(self, before: Snapshot) -> None:
        """Warns of attributes that the model's own forward sets, if a script that reads them finds values of other
        micro-batches."""
        holders = {id(vars(module)) for module in self._split.own_state.modules}
        changed = {name for holder, name, _ in before.changed() if holder in holders}
        sets = sorted(name for name in changed if not name.startswith("_"))
        original = self._split.original
        if sets and (original.on_several_ranks or original.only_loss):
            logger.warning(
                f"the forward of {type(original.model).__name__} sets {', '.join(map(repr, sets))}; a script that "
                f"reads that finds values of other micro-batches if {BLOCK} computes several together, so let the "
                f"model return it, and set {BLOCK}.outputs to 'all'"
            )

    @property
    def sums(self) -> tuple[int, int]:
        return self._split.original.recorder.sums

    @property
    def compiled(self) -> Iterable[nn.Module]:
        return self._split.blocks


def together(hidden: Tensor, others: Sequence[Tensor]) -> Tensors:
    """Returns what a layer passes to the next one."""
    return (hidden, *others) if others else hidden


class OwnModelLayers(SplitLayers):
    """The layers of a module that is no model of transformers, and whose forward calls the blocks of a list one after
    another.

    Raises ConfigError if the model cannot be split, or returns no loss and should.
    """

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
            """What the model returns besides its loss, where only that comes back."""
            # They may draw random numbers, but change nothing.
            without_state = [module for module in model.modules() if not [*module.parameters(), *module.buffers()]]
            super().__init__(original, shown, self._loss_in if only_loss else None, before, without_state)
            self._names = list(signature(model_of(model).forward).parameters)
            with original.evaluating(without_state):
                self._for_loss = self._needed_for_loss(shown) if only_loss else []
                """The arguments without which the model returns no loss."""

    def arguments(self, positional: tuple[Any, ...], named: Mapping[str, Any]) -> Arguments:
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
        """Returns the arguments of a small call without which the forward runs, but returns no loss."""
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
