"""Megatron-core's optimizer on this rank's shards, and its state in Megatron-core's distributed checkpoints.

The files have what Megatron-core saves without the distributed optimizer: whole tensors by the names of parameters. It
has another optimizer for experts that ranks divide, whose groups it saves apart; they load however ranks divide them.
Each tensor is collected on one data-parallel rank, in turn, which saves and loads it. So no rank holds more than about
its shard.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import wraps
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import optimizer as stock
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer, param_group_identifier_keys

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.megatron.loop.flags import refuse_beside_sharding, refuse_flags
from ds_lgamp.integrations.megatron.loop.sharded_model import ShardedChunk, shard_chunks
from ds_lgamp.optimizers.norms import global_norm
from ds_lgamp.partition.unit import Part, parts_of
from ds_lgamp.partition.zero_partition import ZeroPartition

RESHARDABLE = "fully_reshardable"
"""What Megatron-core calls the state of its distributed optimizer if it is saved by parameters."""


class ShardedOptimizer(MixedPrecisionOptimizer):
    """Steps a torch optimizer on the master weights of a partition. Megatron-core's class brings the loss scale, the
    clipping and the order of a step.

    Args:
        optimizer: its groups hold the shards; None if no rank trains anything.
        config: Megatron-core's OptimizerConfig.
        grad_scaler: the scale of the loss; None if it is 1.
        init_state_fn: makes the optimizer's state before the first step.
        partition: its gradients are final when a step begins.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        config: Any,
        grad_scaler: Any,
        init_state_fn: Callable[..., None] | None,
        partition: ZeroPartition,
    ) -> None:
        super().__init__(optimizer, config, grad_scaler, init_state_fn)
        self.partition = partition
        self.is_stub_optimizer = optimizer is None
        self._state = OptimizerState(partition, optimizer, _names_of_states(config))
        # Every element of the gradient counts once over all ranks.
        self.grad_stats_parallel_group = dist.group.WORLD

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, float | None]:
        """Clips the gradients and updates the shards. Returns what Megatron-core's ChainedOptimizer does: whether it
        updated, the norm of the gradient before clipping, and the number of zeros in it if the flags ask for it."""
        if self.prepare_grads():
            return False, None, None
        norm = self.get_grad_norm()
        if self.config.clip_grad > 0:
            clip_grad_by_total_norm_fp32(self.get_parameters(), self.config.clip_grad, norm)
        zeros = self.count_zeros() if self.config.log_num_zeros_in_grad else None
        # The threshold is new in release 0.19.
        skipped = norm > getattr(self.config, "grad_norm_skip_threshold", math.inf)
        updated = not skipped and self.step_with_ready_grads()
        self.partition.drop_gradients()
        return updated, norm, zeros

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: the chunks drop gradients that no step has used."""

    @torch.no_grad()
    def get_grad_norm(self) -> float:
        # Without Apex, Megatron-core's function adds up the squares of a whole shard in one fp32 number.
        group = self.grad_stats_parallel_group
        return global_norm(self.partition.counted_gradients(), group, self.partition.device).item()

    def count_zeros(self) -> float:
        """Returns the number of zeros in the gradient, without those that fill up shards."""
        zeros = torch.zeros(1, device=self.partition.device)
        for unit in self.partition.units:
            counted = {id(gradient) for gradient in unit.master.counted_gradients()}
            for part in parts_of(unit):
                segment = part.segment
                if segment is not None and segment.shard.grad is not None and id(segment.shard.grad) in counted:
                    start = part.in_shard.start - segment.start
                    own = segment.shard.grad[start : start + part.numel]
                    zeros += part.numel - torch.count_nonzero(own)
        dist.all_reduce(zeros, group=self.grad_stats_parallel_group)
        return zeros.item()

    def _copy_model_grads_to_main_grads(self) -> None:
        """Does nothing: ``finalize_model_grads`` has given the shards their gradients."""

    def _collect_main_grad_data_for_unscaling(self) -> list[torch.Tensor]:
        return [shard.grad for shard in self.get_parameters() if shard.grad is not None]

    def _copy_main_params_to_model_params(self) -> None:
        self.partition.follow_update()

    def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
        self.partition.adopt_parameters()

    def sharded_state_dict(
        self, model_sharded_state_dict: dict[str, Any], is_loading: bool = False, metadata: Any = None
    ) -> dict[Any, Any]:
        """Returns what Megatron-core saves, or what it fills. Weights are whole. All ranks call it together."""
        kind = (metadata or {}).get("distrib_optim_sharding_type") if is_loading else None
        if kind not in (None, RESHARDABLE):
            raise ConfigError(
                f"--load names a checkpoint whose optimizer state is {kind}, by buckets of the distributed optimizer; "
                "save it with --dist-ckpt-optim-fully-reshardable, or load without it with --no-load-optim"
            )
        master = MASTER if kind is None else MASTER_OF_DISTRIBUTED
        parts: list[dict[str, Any]] = [{"state": self._state.sharded(model_sharded_state_dict, is_loading, master)}]
        if not is_loading:
            parts = self._with_groups(**parts[0])
        if kind is not None or self.config.fp16 or self.config.bf16:
            scaler = {} if self.grad_scaler is None else {"grad_scaler": self.grad_scaler.state_dict()}
            parts = [{"optimizer": part, **scaler} for part in parts]
        return parts[0] if len(parts) == 1 else dict(enumerate(parts))

    def _with_groups(self, state: dict[Any, Any]) -> list[dict[str, Any]]:
        """Returns the ``state`` with the options of the groups, those of divided experts apart."""
        groups = [{**group, "params": LocalNonpersistentObject([])} for group in self.param_groups]
        experts = [group for group in groups if group.get(OF_EXPERTS)]
        if not experts:
            return [{"state": state, "param_groups": groups}]
        of_experts = {key: value for key, value in state.items() if key == COMMON_STEP}
        others = [group for group in groups if not group.get(OF_EXPERTS)]
        return [{"state": state, "param_groups": others}, {"state": of_experts, "param_groups": experts}]

    def load_state_dict(self, state_dict: dict[Any, Any]) -> None:
        """Takes what :meth:`sharded_state_dict` asked Megatron-core to load."""
        files: list[dict[str, Any]] = [state_dict[key] for key in (0, 1) if key in state_dict] or [state_dict]
        if self.grad_scaler is not None and "grad_scaler" in files[0]:
            self.grad_scaler.load_state_dict(files[0]["grad_scaler"])
        parts = [part.get("optimizer", part) for part in files]
        saved = self._saved_groups([dict(options) for part in parts for options in part["param_groups"]])
        step = parts[0].get("state", {}).get(COMMON_STEP)
        if isinstance(self.optimizer, (torch.optim.Adam, torch.optim.SGD)):
            # Adam of apex and of Transformer Engine has the step in its groups, as the distributed optimizer's files.
            steps = [options.pop("step", None) for options in saved]
            step = steps[0] if step is None else step
        for group, options in zip(self.param_groups, saved, strict=True):
            group.update({key: value for key, value in options.items() if key not in ("params", OF_EXPERTS)})
        if step is None and isinstance(self.optimizer, torch.optim.Adam):
            return  # It was saved before the first step.
        self._state.load(state_dict.get("optimizer", state_dict).get("state", {}), step)

    def _saved_groups(self, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns what a checkpoint has ``saved`` of every group. Megatron-core finds it by keys that do not include
        rates, and so gives all groups the rates of the last. Groups of equal settings have the same order. Experts have
        groups of their own only where ranks divide them.

        Raises ConfigError for a group that the checkpoint has not.
        """
        found, seen = [], Counter[tuple[Any, ...]]()
        for group in self.param_groups:
            key, of_experts = _key_of(group), bool(group.get(OF_EXPERTS))
            alike = [options for options in saved if _key_of(options) == key]
            own = [options for options in alike if bool(options.get(OF_EXPERTS)) == of_experts] or alike
            place = seen[key, of_experts]
            if place >= len(own):
                raise ConfigError(
                    f"--load names a checkpoint that has no group of parameters with {dict(zip(IDENTIFIERS, key))}; "
                    "set rates and weight decay as in the run that saved it, or load without it with --no-load-optim"
                )
            found.append(own[place])
            seen[key, of_experts] += 1
        return [dict(options) for options in found]

    def state_dict(self, is_loading: bool = False) -> dict[str, Any]:
        """Raises ConfigError: other formats than ``torch_dist`` are refused."""
        raise ConfigError("the state of sharded chunks is saved by --ckpt-format torch_dist alone; use it")


def build_sharded_optimizer(build: Callable[..., Any], zero_stage: int) -> Callable[..., Any]:
    """Returns a replacement for Megatron-core's ``get_megatron_optimizer``, which partitions chunks that are to be
    sharded.

    It raises ConfigError without ``config_overrides``: until release 0.17 None means no exceptions from weight decay,
    from 0.18 on the standard ones.
    """

    @wraps(build)
    def get_megatron_optimizer(*positional: Any, **options: Any) -> Any:
        given = signature(build).bind(*positional, **options).arguments
        if not isinstance(given["model_chunks"][0], ShardedChunk):
            return build(*positional, **options)
        overrides = given.get("config_overrides")
        if overrides is None:
            raise ConfigError(
                "config_overrides is None, by which Megatron-core's releases mean different weight decay; pass "
                "get_standard_config_overrides(config) of megatron.core.optimizer, or {} for none"
            )
        return _build(given["config"], given["model_chunks"], overrides, zero_stage)

    return get_megatron_optimizer


def _build(config: Any, models: Sequence[ShardedChunk], overrides: Any, zero_stage: int) -> ShardedOptimizer:
    """Partitions the ``models``, and lets Megatron-core build its torch optimizer and loss scale for the shards.

    Raises ConfigError if the configurations ask for what shards cannot honour.
    """
    refuse_flags(config)
    for settings in (config, models[0].config, models[0].ddp_config):
        refuse_beside_sharding(settings)
    groups = stock._get_param_groups(models, config, overrides)
    partition = shard_chunks(models, groups, zero_stage)
    for group in groups:
        group["params"] = []
    for segment in partition.segments():
        groups[segment.group]["params"].append(segment.shard)
    # Megatron-core's distributed optimizer would need its buffers. The partition does what it is for.
    plain = copy(config)
    plain.use_distributed_optimizer = False
    built = stock._get_megatron_optimizer_based_on_param_groups(plain, models, groups)
    scaler = getattr(built, "grad_scaler", None)
    return ShardedOptimizer(built.optimizer, config, scaler, built.init_state_fn, partition)


OF_EXPERTS = "is_expert_parallel"
"""The option of a group that says whether it has divided experts."""
IDENTIFIERS = tuple(name for name in param_group_identifier_keys if name != OF_EXPERTS)
COMMON_STEP = "common_step"
"""Megatron-core's key for the number of steps of all parameters."""


def _key_of(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns by what Megatron-core finds a group in a checkpoint, except whether it has divided experts. Some loops
    write ``pre_`` before a name."""
    return tuple(group.get(name, group.get(f"pre_{name}")) for name in IDENTIFIERS)


def _names_of_states(config: Any) -> tuple[str, ...]:
    """Returns the tensors that the optimizer keeps for each parameter."""
    if config.optimizer == "sgd":
        return ("momentum_buffer",) if config.sgd_momentum else ()
    return "exp_avg", "exp_avg_sq"


MASTER, MASTER_OF_DISTRIBUTED = "fp32_param", "param"
"""Names of master weights: Megatron-core's, and that of its distributed optimizer, if its state is fully reshardable.
All other names are the same."""


class OwnedPart(NamedTuple):
    """A parameter, and who saves its state."""

    number: int
    """Its number among the parameters of this pipeline rank that train."""
    part: Part
    owner: int
    """The data-parallel rank that saves and loads the whole tensors."""


class OptimizerState:
    """Reads and writes the state of ``optimizer``, whose groups hold the shards of ``partition``.

    Args:
        names: the names of the optimizer's tensors, such as ``exp_avg``.
    """

    def __init__(self, partition: ZeroPartition, optimizer: Any, names: tuple[str, ...]) -> None:
        self._partition, self._optimizer, self._names = partition, optimizer, names

    def sharded(self, model: Mapping[str, Any], is_loading: bool, master: str = MASTER) -> dict[str, Any]:
        """Returns the state by the numbers of parameters, for Megatron-core to save or to load into. Weights are whole.
        All ranks call it together.

        Args:
            model: what Megatron-core saves of the model.
            is_loading: whether the tensors are to be filled.
            master: the name of master weights in the files.
        """
        owned = list(self._owned())
        tensors = get_param_id_to_sharded_param_map(model, (entry.part.parameter for entry in owned))
        state: dict[Any, Any] = {}
        for number, part, owner in owned:
            for name in self._names_of(part):
                whole = self._empty(part) if is_loading else part.gather(self._value(part, name))
                if owner == part.unit.policy.data_group.rank():
                    # Of the data-parallel ranks only the owner has the tensor.
                    main = replace(tensors[number], replica_id=(*tensors[number].replica_id[:-1], 0))
                    prefix = f"optimizer.state.{master if name == MASTER else name}"
                    state.setdefault(number, {})[name] = make_sharded_optimizer_tensor(main, whole, prefix)
        steps = [values["step"] for values in self._optimizer.state.values() if "step" in values]
        if steps and not is_loading:
            state[COMMON_STEP] = steps[0].clone()
        return state

    def load(self, state: Mapping[Any, Any], step: Any) -> None:
        """Takes this rank's parts of tensors that Megatron-core has loaded on their owners. All ranks call it together.

        Args:
            state: the loaded tensors.
            step: how often the optimizer has stepped, for every parameter; None if it counts that itself.
        """
        self._begin(step)
        for number, part, owner in self._owned():
            group = part.unit.policy.data_group
            for name in self._names_of(part):
                whole = state[number][name].detach() if owner == group.rank() else self._empty(part)
                dist.broadcast(whole, group=group, group_src=owner)
                self._value(part, name).copy_(part.of(whole))

    def _begin(self, step: Any) -> None:
        """Makes the state that the optimizer has after its first step."""
        for segment in self._partition.segments():
            values = {name: torch.zeros_like(segment.shard, requires_grad=False) for name in self._names}
            if step is not None:
                values["step"] = torch.as_tensor(step, dtype=torch.float32).clone()
            self._optimizer.state[segment.shard] = values

    def _owned(self) -> Iterator[OwnedPart]:
        parts = [part for unit in self._partition.units if unit.trains for part in parts_of(unit)]
        for number, part in enumerate(parts):
            yield OwnedPart(number, part, number % part.unit.policy.data_group.size())

    def _names_of(self, part: Part) -> tuple[str, ...]:
        return (*self._names, MASTER) if part.unit.master.is_copy else self._names

    def _value(self, part: Part, name: str) -> torch.Tensor:
        """Returns the part [numel] of one tensor of the state; zeros before the optimizer's first step."""
        master, segment = part.unit.master.values, part.segment
        if name == MASTER or segment is None:
            return master[part.in_shard]
        values = self._optimizer.state.get(segment.shard, {})
        if name not in values:
            return torch.zeros_like(master[part.in_shard])
        start = part.in_shard.start - segment.start
        return values[name][start : start + part.numel]

    def _empty(self, part: Part) -> torch.Tensor:
        """Returns a whole tensor to load into."""
        return torch.empty(part.shape, dtype=part.unit.master.values.dtype, device=self._partition.device)
