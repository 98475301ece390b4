"""A model's own forward, split at its blocks.

The forward itself runs, with stand-ins for some of its modules. So masks, position ids, rotary tables and the loss are
those of the model, whatever its architecture. A stand-in for a block notes what the block gets, and passes the hidden
states on. A stand-in for a module ahead of the blocks, such as the embedding, returns zeros of the right shape.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_map_only

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.transformers.blocks import Blocks
from ds_lgamp.integrations.transformers.call import BlockArguments, Call
from ds_lgamp.runtime.random_state import RandomSource, undisturbed

Visit = Callable[[int, Tensor, BlockArguments], Tensor]
"""Called in place of a block, with its number, the hidden states and the other arguments. Returns hidden states."""


_SKIPPED = "the forward of the model skipped blocks; set layerdrop to 0 in the model's config"


class _Reached(Exception):
    """The forward has come as far as it should."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class SplitForward:
    """The three parts of a model's forward: up to the first block, what blocks get, and from the last block on.

    Args:
        model: its parameters may be on other ranks.
        blocks: its blocks.
        ahead: the modules ahead of the blocks that have parameters, by their names in the model.
        behind: all other modules with parameters that contain no block, by their names in the model.
        returned: how many members the tuple has that a block returns; 0 if a block returns a tensor.
        random_sources: generators that the model may draw from.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Blocks,
        ahead: Mapping[str, nn.Module],
        behind: Mapping[str, nn.Module],
        returned: int,
        random_sources: Sequence[RandomSource],
    ) -> None:
        self._forward = model.forward
        self._parent, _, self._name = blocks.path.rpartition(".")
        self._parent_module = model.get_submodule(self._parent)
        self._blocks = blocks.modules
        self._returned, self._random_sources = returned, random_sources
        self._stand_ins = nn.ModuleList([_Block(self, index, block) for index, block in enumerate(blocks.modules)])
        self._ahead = [(*_place(model, path), _Zeros(module)) for path, module in ahead.items()]
        self._behind = [(*_place(model, path), _Absent(self, path, module)) for path, module in behind.items()]
        self._visit: Visit = _not_running
        self._visited = False
        """Whether the forward that runs has called a block."""

    def begin(self, call: Call) -> Tensor:
        """Returns the hidden states that enter the first block. Tells ``call`` what every block gets beside them."""
        noted, stop = self._noting()
        with self._visiting(stop), _replacing(self._behind):
            hidden = self._until_reached(call)
        call.tell_blocks(noted)
        return hidden

    def block_arguments(self, call: Call) -> list[BlockArguments]:
        """Returns what every block gets beside the hidden states. Draws no random numbers."""
        noted, stop = self._noting()
        stand_ins = [*self._ahead, *self._behind]
        with undisturbed(self._random_sources), torch.no_grad(), self._visiting(stop), _replacing(stand_ins):
            self._until_reached(call)
        return noted

    def _noting(self) -> tuple[list[BlockArguments], Visit]:
        """Returns a list of what every block gets beside the hidden states, and the visits that fill it."""
        noted: list[BlockArguments] = []

        def note(index: int, hidden: Tensor, arguments: BlockArguments) -> Tensor:
            noted.append(arguments)
            if index == len(self._blocks) - 1:
                # Every block passed on what the first one got.
                raise _Reached(hidden)
            return hidden

        return noted, note

    def finish(self, call: Call, hidden: Tensor) -> Any:
        """Returns the model's output, from the hidden states that the last block returned."""
        last = len(self._blocks) - 1

        def replace(index: int, passed: Tensor, _: BlockArguments) -> Tensor:
            return hidden if index == last else passed

        with self._visiting(replace), _replacing(self._ahead):
            return self._forward(*call.positional, **call.named)

    def run_block(self, index: int, hidden: Tensor, arguments: BlockArguments) -> Tensor:
        """Returns the hidden states after block ``index``."""
        result = self._blocks[index](hidden, *arguments.positional, **arguments.named)
        if (len(result) if isinstance(result, tuple) else 0) != self._returned:
            raise ConfigError(
                f"block {index} of the model returned other things than block 0; remove the {BLOCK} block"
            )
        return result[0] if self._returned else result

    def visit(self, index: int, hidden: Tensor, arguments: BlockArguments) -> Any:
        """Returns what the forward gets in place of the result of block ``index``."""
        self._visited = True
        passed = self._visit(index, hidden, arguments)
        return (passed, *[None] * (self._returned - 1)) if self._returned else passed

    def _until_reached(self, call: Call) -> Tensor:
        try:
            self._forward(*call.positional, **call.named)
        except _Reached as reached:
            return reached.hidden
        raise ConfigError(_SKIPPED)

    def refuse_absent(self, path: str) -> NoReturn:
        """Raises ConfigError, because a module that works behind the blocks was called too early."""
        if self._visited:
            raise ConfigError(_SKIPPED)
        raise ConfigError(
            f"with these arguments '{path}' runs ahead of the model's blocks, which it does not with token ids alone; "
            f"with a {BLOCK} block, pass arguments for text only"
        )

    @contextmanager
    def _visiting(self, visit: Visit) -> Iterator[None]:
        """Runs the stand-ins of blocks inside the block."""
        self._visit, self._parent_module._modules[self._name] = visit, self._stand_ins
        self._visited = False
        try:
            yield
        finally:
            self._visit, self._parent_module._modules[self._name] = _not_running, self._blocks


@contextmanager
def _replacing(stand_ins: Sequence[tuple[nn.Module, str, nn.Module]]) -> Iterator[None]:
    """Runs stand-ins inside the block. Each has the module that it belongs to, and its name there."""
    own = [parent._modules[name] for parent, name, _ in stand_ins]
    for parent, name, stand_in in stand_ins:
        parent._modules[name] = stand_in
    try:
        yield
    finally:
        for (parent, name, _), module in zip(stand_ins, own):
            parent._modules[name] = module


class _StandIn(nn.Module):
    """Stands in for a module of the model, and has its attributes, which forwards ask for."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        # Not registered: it belongs to the model.
        self.__dict__["_own"] = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_own"], name)


class _Block(_StandIn):
    """The stand-in for a block."""

    def __init__(self, split: SplitForward, index: int, block: nn.Module) -> None:
        super().__init__(block)
        self._split, self._index = split, index

    def forward(self, *positional: Any, **named: Any) -> Any:
        if positional:
            hidden, positional = positional[0], positional[1:]
        else:
            hidden = named.pop("hidden_states")
        return self._split.visit(self._index, hidden, BlockArguments(positional, named))


class _Absent(_StandIn):
    """The stand-in for a module that may be on another rank."""

    def __init__(self, split: SplitForward, path: str, module: nn.Module) -> None:
        super().__init__(module)
        self._split, self._path = split, path

    def forward(self, *positional: Any, **named: Any) -> Any:
        self._split.refuse_absent(self._path)


class _Zeros(_StandIn):
    """The stand-in for a module ahead of the blocks: returns zeros of the shape that the module would return."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._shapes = {name: _full_shape(parameter) for name, parameter in module.named_parameters()}
        self._known: dict[Any, Any] = {}

    def forward(self, *positional: Any, **named: Any) -> Any:
        leaves, structure = tree_flatten((positional, named))
        key = str(structure), tuple((leaf.shape, leaf.dtype) if torch.is_tensor(leaf) else leaf for leaf in leaves)
        if key not in self._known:
            self._known[key] = self._imagine(positional, named)
        return tree_map_only(_Shape, _Shape.zeros, self._known[key])

    def _imagine(self, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
        module = self.__dict__["_own"]
        parameters = dict(module.named_parameters())
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
            imagined = {
                name: torch.empty(shape, dtype=parameters[name].dtype, device=parameters[name].device)
                for name, shape in self._shapes.items()
            }
            positional, named = tree_map_only(Tensor, mode.from_tensor, (positional, named))
            result = functional_call(module, imagined, positional, named)
            return tree_map_only(Tensor, _Shape, result)


class _Shape:
    """Shape, dtype and device of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device

    def zeros(self) -> Tensor:
        """Returns zeros, which share the memory of one element."""
        return torch.zeros((), dtype=self.dtype, device=self.device).expand(self.shape)


def _full_shape(parameter: nn.Parameter) -> torch.Size:
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def _place(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    parent, _, name = path.rpartition(".")
    return model.get_submodule(parent), name


def _not_running(index: int, hidden: Tensor, arguments: BlockArguments) -> Tensor:
    raise RuntimeError("the stand-in for a block is called outside of a forward")
