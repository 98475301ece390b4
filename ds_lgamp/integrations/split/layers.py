"""A model as the layers of a pipeline: what precedes its blocks, the blocks, and what follows them."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ds_lgamp.config import BLOCK, LgampConfig
from ds_lgamp.integrations.split.beside import Comparison
from ds_lgamp.integrations.split.blocks import Blocks
from ds_lgamp.integrations.split.call import Call, Calls, Tree
from ds_lgamp.integrations.split.checks import check_imagined, check_travels, results_behind
from ds_lgamp.integrations.split.foreign import check_foreign
from ds_lgamp.integrations.split.forward import SplitForward
from ds_lgamp.integrations.split.parts import Part, Sides, parameters_of, part_of
from ds_lgamp.integrations.split.snapshot import Snapshot
from ds_lgamp.integrations.split.survey import Survey, evaluating
from ds_lgamp.runtime.chunk import Tensors, as_tuple
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
    """A block of the model. Takes and returns hidden states, with what the next layers need beside them."""

    def __init__(self, path: str, block: nn.Module, index: int, split: SplitForward, calls: Calls) -> None:
        super().__init__({path: block})
        self._index, self._split, self._calls = index, split, calls

    def forward(self, inputs: Tensors) -> Tensors:
        hidden, *others = as_tuple(inputs)
        return together(*self._split.run_block(self._index, self._calls, hidden, others))


class End(Tree):
    """What follows the blocks. Takes hidden states, with what travels with them, returns the model's output."""

    def __init__(self, parts: Mapping[str, Part], split: SplitForward, calls: Calls) -> None:
        super().__init__(parts)
        self._split, self._calls = split, calls

    def forward(self, inputs: Tensors) -> Any:
        hidden, *travels = as_tuple(inputs)
        return self._split.finish(self._calls.current, hidden, travels)


class Ends(End):
    """What precedes and what follows the blocks, as one module, because they share parameters. Called, it finishes."""

    def begin(self, call: Call) -> Tensors:
        """Takes a call, returns hidden states, with what travels with them."""
        return together(*self._split.begin(call))


class SplitLayers:
    """The layers of a model that calls its blocks one after another.

    Args:
        model: the model.
        blocks: its blocks.
        shown: what a small call of it showed.
        random_sources: generators that the model may draw from.
        loss_in: returns the loss in an output, if nothing else there has gradients.
        settings: the block.

    Raises ConfigError if a layer would need what other ranks lack.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Blocks,
        shown: Survey,
        random_sources: Sequence[RandomSource],
        loss_in: Callable[[Any], Any] | None,
        settings: LgampConfig,
    ) -> None:
        ahead, behind = ({path: part_of(model, path) for path in paths} for paths in (shown.ahead, shown.behind))
        self.calls, self.partition_method = Calls(), f"type:^{Block.__name__}$"
        self._blocks = list(blocks.named.values())
        sides = Sides(ahead, behind, shown.read_behind or _share(ahead, behind))
        self._split = split = SplitForward(model, blocks, sides, shown, random_sources, loss_in)
        with evaluating(model, blocks):
            if (settings.pipeline_ranks or 1) > 1:
                check_imagined(split, shown)
            split.travelling.add(*results_behind(split, shown, random_sources, loss_in is not None))
            if shown.travels_to_blocks or shown.travels_to_output:
                check_travels(split, shown, random_sources)
        own_blocks = [
            Block(f"{blocks.path}.{name}", block, index, split, self.calls)
            for index, (name, block) in enumerate(blocks.named.items())
        ]
        if sides.is_shared:
            ends = Ends(sides.held_behind, split, self.calls)
            self.modules: list[nn.Module] = [ends, *own_blocks, ends]
        else:
            self.modules = [Beginning(ahead, split), *own_blocks, End(sides.held_behind, split, self.calls)]

    def compile(self, **options: Any) -> None:
        """Compiles the blocks with torch.compile's ``options``."""
        for block in self._blocks:
            block.compile(**options)

    def compare(
        self,
        model: nn.Module,
        blocks: Blocks,
        shown: Survey,
        random_sources: Sequence[RandomSource],
        settings: LgampConfig,
        before: Snapshot,
    ) -> None:
        """Raises ConfigError if something passes by the arguments of blocks, or if the layers compute something else
        than the model. See :func:`check_foreign` and :class:`Comparison`.

        Args:
            before: what the model held ahead of all forwards.
        """
        first, apart = self.modules[0], (settings.pipeline_ranks or 1) > 1
        layers = [first.begin if isinstance(first, Ends) else first, *self.modules[1:]]
        try:
            own = self._split.own_state.modules
            comparison = Comparison(model, blocks, layers, self.calls, own, random_sources, self._split.loss_in)
            with evaluating(model, blocks):
                check_foreign(self._split, self._blocks, shown, random_sources)
                comparison.check(shown.arguments, apart, settings.recompute != "none")
            holders = {id(vars(module)) for module in own}
            changed = {name for holder, name, _ in before.changed() if holder in holders}
            sets = sorted(name for name in changed if not name.startswith("_"))
            if sets and (apart or self._split.loss_in is not None):
                logger.warning(
                    f"the forward of {type(model).__name__} sets {', '.join(map(repr, sets))}; a script that reads "
                    f"that finds values of other micro-batches if {BLOCK} computes several together, so let the model "
                    f"return it, and set {BLOCK}.outputs to 'all'"
                )
        finally:
            self.calls.forget()

    @staticmethod
    def first_input(call: Call) -> Call:
        return call


def together(hidden: Tensor, others: Sequence[Tensor]) -> Tensors:
    """Returns what a layer passes to the next one."""
    return (hidden, *others) if others else hidden


def _share(ahead: Mapping[str, Part], behind: Mapping[str, Part]) -> bool:
    """Returns whether parts ahead of the blocks share a parameter with parts behind them."""
    first, second = ({id(each) for each in parameters_of(parts.values())} for parts in (ahead, behind))
    return not first.isdisjoint(second)
