"""Updates whose results are rounded: bf16 weights and moments, block by block, up or down by chance; moments of 8 bits,
with a scale for each block, to the nearest number.

Rounded to the nearest number of bf16, an update that is smaller than half the distance of two such numbers is lost.
Rounded by chance, a result x between the neighbours a < b becomes b with probability (x - a) / (b - a), so it is x on
average: S. Gupta and others, "Deep Learning with Limited Numerical Precision", arXiv 1502.02551. A result that bf16 has
stays as it is.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import cache
from importlib import import_module
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch.nn import Parameter

from ds_lgamp.partition.shards import SCALES, Segment, is_elementwise
from ds_lgamp.partition.unit import Unit, parts_of
from ds_lgamp.schedule.spec import RANDOM_NUMBERS, STATE_BLOCK

_LOST_BITS = 16
"""The low bits of an fp32 number, which bf16 lacks."""


class Noise:
    """Numbers from 0 to 65,535 for every element of every parameter at every update.

    They depend on the parameter's name, on the element's place in it and on the number of the update, but on no layout:
    a run over other ranks, or one that goes on from a checkpoint, rounds alike.

    Args:
        block: the most elements that are rounded at once.
    """

    def __init__(self, block: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(1 << _LOST_BITS, (RANDOM_NUMBERS,), generator=generator, dtype=torch.int32)
        # Any number may be the first, and the last is followed by the first.
        self._numbers = drawn.repeat(2 + block // RANDOM_NUMBERS)[: RANDOM_NUMBERS + block].to(device, copy=True)

    def round_(self, values: torch.Tensor, key: str, place: int) -> None:
        """Rounds fp32 ``values`` to numbers that bf16 has.

        Args:
            key: names the parameter, what of it is rounded, and the update.
            place: the place of the first value in the parameter.
        """
        # A GPU's own NaN has all low bits, so that a sum would carry into the sign and leave zero.
        values.nan_to_num_(float("nan"), float("inf"), -float("inf"))
        begin = (crc32(key.encode()) + place) % RANDOM_NUMBERS
        bits = values.view(torch.int32).add_(self._numbers[begin : begin + values.numel()])
        # A sum has carried into the last bit of bf16, or it has not.
        bits.bitwise_and_(-1 << _LOST_BITS)


class _Piece(NamedTuple):
    """A part of a parameter in a shard."""

    name: str
    start: int
    """Where it begins in the shard."""
    end: int
    place: int
    """The place of its first element in the whole parameter."""

    def within(self, start: int, end: int) -> "_Piece":
        """Returns what of it lies between ``start`` and ``end`` in the shard, as seen from ``start``."""
        first, last = max(self.start, start), min(self.end, end)
        return _Piece(self.name, first - start, last - start, self.place + first - self.start)


class RoundedSteps:
    """Steps an optimizer on copies in fp32 of blocks of a shard.

    Args:
        twin: steps on the parameters and the state that it is given, as the optimizer does.
        block: the most elements that it updates at once.
    """

    def __init__(self, twin: Any, block: int) -> None:
        self._twin, self._block = twin, block
        self._noise: Noise | None = None
        self._copies: dict[str, torch.Tensor] = {}
        self._pieces: dict[Unit, list[_Piece]] = {}
        self._counts: dict[torch.Tensor, tuple[torch.Tensor, int]] = {}
        """By shard, the tensor that counts its updates, and its value, so that no step waits for a device to read it.
        """

    def forget_counts(self) -> None:
        """Forgets how often shards were updated. The next step reads it from the state, and so waits for a device."""
        self._counts.clear()

    @torch.no_grad()
    def step(
        self,
        unit: Unit,
        options: Sequence[dict[str, Any]],
        state: dict,
        copies: Mapping[torch.Tensor, torch.Tensor] = MappingProxyType({}),
        found_inf: torch.Tensor | None = None,
    ) -> None:
        """Updates the shards of ``unit`` that have a gradient, or their ``copies``, to which ``state`` belongs then.

        Args:
            options: the hyper-parameters of every parameter group.
            found_inf: 1 where the optimizer's kernel shall change nothing, as torch's fused ones read it.
        """
        self._twin.found_inf = found_inf
        for segment in unit.master.segments:
            shard = copies.get(segment.shard, segment.shard)
            if shard.grad is None:
                continue
            if self._noise is None:
                # Drawn with the first update, not while the model is built.
                self._noise = Noise(self._block, shard.device)
            before: dict[str, Any] = state.get(shard) or {}
            after: dict[str, Any] = {}
            count = 1 + self._count(segment.shard, before)
            for start in range(segment.start, segment.end, self._block):
                end = min(start + self._block, segment.end)
                own = (piece for piece in self._pieces_of(unit) if piece.start < end and start < piece.end)
                pieces = [piece.within(start, end) for piece in own]
                block = slice(start - segment.start, end - segment.start)
                weights, moments = self._step_block(shard, block, before, options[segment.group])
                self._round(weights, shard[block], pieces, f"weights/{count}")
                for key, value in moments.items():
                    if is_elementwise(value, weights):
                        home = after.setdefault(key, before[key] if key in before else torch.empty_like(shard))
                        self._round(value, home[block], pieces, f"{key}/{count}")
                    else:
                        after[key] = value
            state[shard] = after
            self._counts[segment.shard] = after["step"], count
        self._copies.clear()

    def _step_block(
        self, shard: torch.Tensor, block: slice, state: Mapping[str, Any], options: dict[str, Any]
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Returns the weights and the state of a ``block`` of ``shard`` after a step, in fp32."""
        assert shard.grad is not None, "the step begins with final gradients"
        weights = Parameter(self._copy("weights", shard[block]))
        weights.grad = self._copy("gradient", shard.grad[block])
        own = {
            key: self._copy(key, value[block]) if is_elementwise(value, shard) else deepcopy(value)
            for key, value in state.items()
        }
        self._twin.state = defaultdict(dict, {weights: own} if own else {})
        self._twin.param_groups = [{**options, "params": [weights]}]
        self._twin.step()
        stepped = self._twin.state[weights]
        # It would keep the copies until the next step.
        self._twin.state, self._twin.param_groups = {}, []
        return weights.detach(), stepped

    def _copy(self, key: str, values: torch.Tensor) -> torch.Tensor:
        """Returns ``values`` in fp32, in memory that the next blocks of the unit take again: new pages cost more than
        the copy."""
        if key not in self._copies or self._copies[key].numel() < values.numel():
            self._copies[key] = torch.empty_like(values, dtype=torch.float32)
        return self._copies[key][: values.numel()].copy_(values)

    def _round(self, values: torch.Tensor, home: torch.Tensor, pieces: Sequence[_Piece], key: str) -> None:
        """Writes fp32 ``values`` to ``home``, and rounds them before if that has bf16."""
        assert self._noise is not None, "the step has drawn it"
        for piece in pieces if home.dtype == torch.bfloat16 else ():
            self._noise.round_(values[piece.start : piece.end], f"{piece.name}/{key}", piece.place)
        home.copy_(values)

    def _count(self, shard: torch.Tensor, state: Mapping[str, Any]) -> int:
        """Returns how often ``shard`` has been updated."""
        if not state:
            return 0
        counter, count = self._counts.get(shard, (None, 0))
        return count if counter is state["step"] else int(state["step"])

    def _pieces_of(self, unit: Unit) -> list[_Piece]:
        """Returns this rank's parts of the parameters of ``unit``."""
        if unit not in self._pieces:
            self._pieces[unit] = [
                _Piece(
                    part.name,
                    part.in_shard.start,
                    part.in_shard.stop,
                    # Slices along the first dimension follow each other in the whole parameter.
                    sum(part.slice_offsets[:1]) * part.shape[1:].numel() + part.in_parameter.start,
                )
                for part in parts_of(unit)
                if part.numel
            ]
        return self._pieces[unit]


class InEightBits(torch.optim.Optimizer):
    """Steps as an optimizer of bitsandbytes with state of 8 bits does, with its kernels.

    A block of :data:`STATE_BLOCK` elements has a scale, the largest of their absolute values. Parameters and parts
    begin at multiples of that, so that blocks, and with them results, are those of one process with whole parameters.
    Of small parameters bitsandbytes keeps the state in 32 bits, and of those for which the script asks it to.
    """

    rule: str
    """What bitsandbytes calls the rule of the update."""
    tensors: int
    """How many states it has of an element."""

    def __init__(self, source: Any) -> None:
        super().__init__(source.param_groups, source.defaults)
        self.least, self.skip_zeros = source.args.min_8bit_size, source.args.skip_zeros
        """The elements of the smallest parameter whose state has 8 bits; whether zeros of a gradient change nothing."""
        self.exact: frozenset[str] = frozenset()
        """The names of larger parameters whose state has 32 bits."""
        self._in_32_bits: set[torch.Tensor] = set()
        self._kernels = import_module("bitsandbytes.functional")
        self._maps: dict[torch.device, dict[str, torch.Tensor]] = {}
        """The numbers that 8 bits stand for: of states with a sign, and of those without."""

    def keeps_in_32_bits(self, name: str, elements: int) -> bool:
        """Whether the parameter ``name``, of so many ``elements``, has state in 32 bits."""
        return elements < self.least or name in self.exact

    def watch(self, segments: Iterable[Segment]) -> None:
        """Learns of ``segments``, which its groups hold."""
        entries = ((segment.entry, segment.shard) for segment in segments)
        self._in_32_bits.update(shard for entry, shard in entries if entry is not None and entry.in_32_bits)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Updates the shards that have a gradient. A ``closure`` would compute another one."""
        for group in self.param_groups:
            for shard in group["params"]:
                if shard.grad is not None:
                    self._update(group, shard, self.state[shard])

    def _update(self, group: dict[str, Any], shard: Parameter, state: dict[str, Any]) -> None:
        if not state:
            state.update(step=0, **self._new_state(shard))
        state["step"] += 1
        first, second = group["betas"]
        options: dict[str, Any] = {
            "optimizer_name": self.rule,
            **{"g": shard.grad, "p": shard, "state1": state["state1"], "state2": state.get("state2")},
            **{"beta1": first, "beta2": second, "beta3": 0.0, "alpha": 0.0, "eps": group["eps"]},
            **{"step": state["step"], "lr": float(group["lr"]), "weight_decay": group["weight_decay"]},
            "skip_zeros": self.skip_zeros,
        }
        # As with bitsandbytes, what a checkpoint has decides, although the script may ask for something else since.
        if state["state1"].dtype == torch.float32:
            self._kernels.optimizer_update_32bit(**options)
        else:
            scales = {key: state.get(key) for key in SCALES}
            self._kernels.optimizer_update_8bit_blockwise(**options, **scales, **self._maps_on(shard.device))

    def _new_state(self, shard: Parameter) -> dict[str, torch.Tensor]:
        dtype = torch.float32 if shard in self._in_32_bits else torch.uint8
        state = {f"state{number}": torch.zeros_like(shard, dtype=dtype) for number in range(1, self.tensors + 1)}
        if dtype == torch.uint8:
            for number in range(1, self.tensors + 1):
                scales = shard.numel() // STATE_BLOCK
                state[f"absmax{number}"] = torch.zeros(scales, dtype=torch.float32, device=shard.device)
        return state

    def _maps_on(self, device: torch.device) -> dict[str, torch.Tensor]:
        if device not in self._maps:
            make = self._kernels.create_dynamic_map
            self._maps[device] = {"qmap1": make(signed=True).to(device), "qmap2": make(signed=False).to(device)}
        return self._maps[device]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which would give every state the type of the weights."""
        super().load_state_dict(state_dict)
        places = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        shards = chain.from_iterable(group["params"] for group in self.param_groups)
        for place, shard in zip(places, shards):
            for key, value in state_dict["state"].get(place, {}).items():
                self.state[shard][key] = value.to(shard.device) if isinstance(value, torch.Tensor) else value


_RULES = {
    "adagrad": ("Adagrad8bit", 1),
    "adam": ("AdamW8bit", 2),
    "lion": ("Lion8bit", 1),
    "momentum": ("SGD8bit", 1),
    "rmsprop": ("RMSprop8bit", 1),
}
"""By rule of bitsandbytes that takes each element by itself, the name of its optimizer and how many states that has.
Its Adam decays weights as its AdamW does."""


@cache
def class_in_8_bits(rule: str) -> type[InEightBits] | None:
    """Returns the optimizer that takes the place of those of bitsandbytes with this ``rule``; None if there is none."""
    if rule not in _RULES:
        return None
    name, tensors = _RULES[rule]
    return type(name, (InEightBits,), {"rule": rule, "tensors": tensors})
