"""Finds tensors that a forward hands to its blocks by another way than arguments, also in models too large to compute:
blocks run with imagined tensors for their arguments, parameters and buffers, so a real one has come beside them."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.split.call import Call
from ds_lgamp.integrations.split.forward import SplitForward
from ds_lgamp.integrations.split.imagined import Imagined, UnknownShape
from ds_lgamp.integrations.split.stand_ins import Touched
from ds_lgamp.integrations.split.survey import Survey
from ds_lgamp.runtime.recompute import RandomSource, undisturbed


def check_foreign(
    split: SplitForward, blocks: Sequence[nn.Module], shown: Survey, random_sources: Sequence[RandomSource]
) -> None:
    """Raises ConfigError if a block computes with a tensor that the forward made outside of it, and that is none of its
    arguments. A block that cannot be imagined is not looked at."""
    call = Call(*shown.arguments)
    with undisturbed(random_sources):
        with torch.no_grad(), _Made() as made:
            noted, _ = split.note_present(call)
        hidden = noted.hidden
        for index, (block, beside) in enumerate(zip(blocks, noted.blocks, strict=True)):
            hidden = noted.entered.get(index, hidden)
            assert beside.autocast is not None, "noted with the arguments"
            foreign = _Foreign(made)
            with suppress(UnknownShape, Touched):
                # The block's own tensors are copies, which none of those is that were made.
                positional, named, attributes = tree_map_only(
                    Tensor, torch.clone, ((hidden, *beside.positional), dict(beside.named), dict(beside.attributes))
                )
                split.attributes.set(index, attributes)
                with beside.autocast.entered(), foreign:
                    Imagined(block)(positional, named)
            if foreign.found is not None:
                raise ConfigError(
                    f"block {index} computes with a tensor of shape {[*foreign.found.shape]} that the forward of the "
                    "model made and did not give it as an argument, but left in a global, a context variable, a "
                    f"closure, or an attribute of another object; with a {BLOCK} block, pass it as an argument"
                )


class _Made(TorchDispatchMode):
    """Notes all tensors that are made."""

    def __init__(self) -> None:
        super().__init__()
        self._tensors: dict[int, Tensor] = {}
        """One by storage. While they live, no other one gets it."""

    def __torch_dispatch__(self, function: Any, types: Any, positional: Any = (), named: Any = None) -> Any:
        result = function(*positional, **(named or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._tensors.setdefault(leaf.untyped_storage()._cdata, leaf)
        return result

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._tensors


class _Foreign(TorchFunctionMode):
    """Finds a tensor among those ``made`` with which functions compute."""

    def __init__(self, made: _Made) -> None:
        super().__init__()
        self._made = made
        self.found: Tensor | None = None

    def __torch_function__(self, function: Any, types: Any, positional: Any = (), named: Any = None) -> Any:
        named = named or {}
        result = function(*positional, **named)
        # Whoever asks for a shape or a device computes with no values.
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            for leaf in tree_leaves((positional, named)):
                if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor) and leaf in self._made:
                    self.found = leaf
        return result
