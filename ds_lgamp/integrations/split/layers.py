"""A model as the layers of a pipeline: what precedes its blocks, the blocks, and what follows them."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ds_lgamp.config import BLOCK
from ds_lgamp.integrations.split.call import Call, Calls, Survey
from ds_lgamp.integrations.split.checks import check_foreign, check_imagined, check_parts, check_travels, results_after
from ds_lgamp.integrations.split.comparison import Comparison
from ds_lgamp.integrations.split.forward import SplitForward
from ds_lgamp.integrations.split.parts import Original, Part, Tree
from ds_lgamp.integrations.split.state import Snapshot
from ds_lgamp.runtime.chunk import Tensors, as_tuple

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
        original: the model.
        shown: what a small call of it showed.
        loss_in: returns the loss in an output, if nothing else there has gradients.
        before: what the model held before all forwards.
        training: modules that train in checks, because they change nothing.

    Raises ConfigError if a layer would need what other ranks lack, or if the layers compute something else than the
    model. See :mod:`ds_lgamp.integrations.split.checks` and :class:`Comparison`.
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
        self.calls, self.partition_method = Calls(), f"type:^{Block.__name__}$"
        self._split = split = SplitForward(original, shown, loss_in)
        with original.evaluating():
            if original.on_several_ranks:
                check_imagined(split, shown)
            split.travelling.add(*results_after(split, shown))
            if shown.travels_to_blocks or shown.travels_to_output:
                check_travels(split, shown)
        own_blocks = [
            Block(f"{blocks.path}.{name}", block, index, split, self.calls)
            for index, (name, block) in enumerate(blocks.named.items())
        ]
        sides = split.sides
        if sides.are_shared:
            ends = Ends(sides.of_last_layer, split, self.calls)
            self.modules: list[nn.Module] = [ends, *own_blocks, ends]
        else:
            self.modules = [Beginning(sides.before, split), *own_blocks, End(sides.after, split, self.calls)]
        with original.evaluating(training):
            check_parts(split, shown)
        try:
            with original.evaluating():
                check_foreign(split, shown)
                self._compare(shown)
        finally:
            self.calls.forget()
        self._warn_of_attributes(before)

    def _compare(self, shown: Survey) -> None:
        first = self.modules[0]
        layers = [first.begin if isinstance(first, Ends) else first, *self.modules[1:]]
        Comparison(self._split, layers, self.calls).check(shown.arguments)

    def _warn_of_attributes(self, before: Snapshot) -> None:
        """Warns of attributes that the model's own forward sets, if a script that reads them finds those of other
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

    def compile(self, **options: Any) -> None:
        """Compiles the blocks with torch.compile's ``options``."""
        for block in self._split.blocks:
            block.compile(**options)

    @staticmethod
    def first_input(call: Call) -> Call:
        return call


def together(hidden: Tensor, others: Sequence[Tensor]) -> Tensors:
    """Returns what a layer passes to the next one."""
    return (hidden, *others) if others else hidden
