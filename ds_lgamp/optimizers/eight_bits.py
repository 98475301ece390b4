"""Updates of moments of 8 bits, with a scale for each block, rounded to the nearest number."""

from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from itertools import chain
from typing import Any

import torch
from torch.nn import Parameter

from ds_lgamp.partition.shards import SCALES, Segment
from ds_lgamp.schedule.spec import STATE_BLOCK


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
