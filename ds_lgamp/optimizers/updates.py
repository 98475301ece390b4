"""Steps a torch optimizer on the shards of all units at once, or of one unit after another.
:mod:`ds_lgamp.optimizers.host_updates` does so in the host's thread."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch.optim import optimizer as of_torch

from ds_lgamp.optimizers.rounding import InEightBits, RoundedSteps
from ds_lgamp.optimizers.tensors import TensorOptimizer
from ds_lgamp.partition.host import ShardUpdate, Work, arriving
from ds_lgamp.partition.policy import UnitParameter
from ds_lgamp.partition.shards import Segment
from ds_lgamp.partition.unit import Unit, parts_of
from ds_lgamp.partition.zero_partition import ZeroPartition
from ds_lgamp.schedule.spec import BLOCK_ON_DEVICE

Options = list[dict[str, Any]]
"""The hyper-parameters of every parameter group."""


def postpone(unit: Unit, update: Work, announce: Callable[[], None] = lambda: None) -> None:
    """Leaves the update of this rank's shard of ``unit`` to :func:`start_postponed`, or to whoever needs its values.
    All data-parallel ranks do so together. With offloading, the host's thread calls ``update``, right after
    ``announce``."""
    host = unit.policy.host
    unit.storage.expect(ShardUpdate(update, None if host is None else host.updates, announce))


def start_postponed(units: Iterable[Unit]) -> None:
    """Starts the updates of ``units`` that were left to later. On the device they are over at once."""
    for unit in units:
        if unit.policy.host is None:
            unit.storage.catch_up()
        elif unit.storage.pending is not None:
            unit.storage.pending.start()


def has_other_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a function of the user has taken the place of the optimizer's step, or of its class's. A scheduler of
    torch wraps the step of the class, and torch wraps its function."""
    kind: Any = type(optimizer)
    own, function = vars(optimizer).get("step"), kind.step
    if own is not None and getattr(own, "__wrapped__", None) is not function:
        return True
    known = {parent.__module__ for parent in kind.__mro__}
    while function is not None:
        module = getattr(function, "__globals__", {}).get("__name__", "")
        if module not in known and not module.startswith("torch."):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


class Updates:
    """Updates units on the device, all at once or one after another, in the step or when a program asks for it.

    Args:
        optimizer: its groups hold the shards of ``partition`` from now on. It begins without state.
        when: when a step updates a chunk, one of ``schedule.spec.UPDATES``.
        rounds: whether bf16 weights and moments are rounded by chance.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, partition: ZeroPartition, when: str, rounds: bool = False
    ) -> None:
        self.optimizer, self.when, self.partition = optimizer, when, partition
        self._rounded = RoundedSteps(twin_of(optimizer), BLOCK_ON_DEVICE) if rounds else None
        self._lagging: Sequence[Unit] = ()
        """Units whose weights do not equal their master weights, because the optimizer is updating these."""
        for group in optimizer.param_groups:
            group["params"] = []
        for segment in partition.segments():
            optimizer.param_groups[segment.group]["params"].append(segment.shard)
        optimizer.state = _initial_state(optimizer, partition.segments())
        # This hook runs before all others, because those may read parameters.
        hook = optimizer.register_step_post_hook(self._follow)
        optimizer._optimizer_step_post_hooks.move_to_end(hook.id, last=False)  # type: ignore[attr-defined]
        # What torch reads and writes of the state is current.
        optimizer.register_state_dict_pre_hook(lambda _: partition.catch_up())
        optimizer.register_load_state_dict_pre_hook(lambda _, __: partition.catch_up())

    def cannot_take(self, unit: Unit, thawed: UnitParameter) -> str | None:
        """Returns why it cannot update a parameter of a frozen ``unit`` that the script has unfrozen, as a clause; None
        if it can."""
        shape = next(part.whole_shape for part in parts_of(unit) if part.name == thawed.name)
        options = {} if thawed.group_of_script is None else self.optimizer.param_groups[thawed.group_of_script]
        if options.get("use_muon") and (len(shape) != 2 or shape[0] % options.get("blocks", 1)):
            return f"it has shape {list(shape)}, which the Muon of its group does not take"
        if unit.policy_in_training.host is not None:
            return "nothing else on its pipeline rank trained with offload_optimizer"
        return None

    def take(self, units: Iterable[Unit]) -> None:
        """Updates the ``units``, too, whose parameters the script has unfrozen. These count their steps from now on."""
        for unit in units:
            for segment in unit.master.segments:
                self.optimizer.param_groups[segment.group]["params"].append(segment.shard)
            self.optimizer.state.update(_initial_state(self.optimizer, unit.master.segments))
            cut(self.optimizer, self.partition, unit)

    @property
    def is_watched(self) -> bool:
        """Whether user code runs with each step of the optimizer: hooks, or a function in place of its step. Such code
        expects one step per batch, with all gradients."""
        optimizer = self.optimizer
        hooks = (
            *optimizer._optimizer_step_pre_hooks,  # type: ignore[attr-defined]
            *of_torch._global_optimizer_pre_hooks,
            *of_torch._global_optimizer_post_hooks,
        )
        others = len(optimizer._optimizer_step_post_hooks) > 1  # type: ignore[attr-defined]
        return bool(hooks) or others or has_other_step(optimizer)

    def options(self) -> Options:
        """Returns a copy of the current hyper-parameters."""
        return [
            {key: deepcopy(value) for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]

    def with_gradients(self) -> list[Unit]:
        """The units whose gradients are final, except those of an update that is left to later or under way."""
        return [unit for unit in self.partition.units if unit.reduction.is_final and unit.storage.pending is None]

    def step(self, factor: Any, is_watched: bool) -> None:
        """Updates what no earlier update has updated, or leaves that to later.

        Args:
            factor: what multiplies the gradients.
            is_watched: whether somebody expects one step of the optimizer with all gradients.

        Raises:
            ValueError: somebody expects one step, but each block of the weights has its own.
        """
        units, host = self.with_gradients(), self.partition.host
        if is_watched and self._rounded is not None:
            raise ValueError(
                "stochastic_rounding is true, but a hook on the optimizer, or a function in place of its step, expects "
                "one step of all weights; remove one of them"
            )
        if is_watched or (self.when != "next_step" and host is None):
            if host is not None and self._found_inf is not None:
                # The optimizer's kernels on the host read it there.
                self.optimizer.found_inf = self._found_inf.cpu()  # type: ignore[attr-defined]
            for unit in units:
                unit.scale_gradient(factor)
            self.update(units)
            return
        postponed = [unit for unit in units if unit.policy.host is host]
        self.step_later(postponed, factor)
        if self.when != "next_step":
            start_postponed(postponed)
        # Beside a host that updates some units, the step updates the others.
        staying = [unit for unit in units if unit not in postponed]
        if staying:
            for unit in staying:
                unit.scale_gradient(factor)
            with self._groups_of(staying, self.options()):
                self.update(staying)

    def step_early(self, units: Sequence[Unit], factor: Any) -> None:
        """Updates ``units`` before the step. With offloading, it only hands the updates to the host's thread."""
        if self.partition.host is not None:
            self.step_later(units, factor)
            start_postponed(units)
            return
        unchanged: Options = [{}] * len(self.optimizer.param_groups)
        for unit in units:
            self.update_alone(unit, factor, unchanged)

    def step_later(self, units: Sequence[Unit], factor: Any) -> None:
        """Leaves the updates to later, with the hyper-parameters of now."""
        options, moves = self.options(), self.partition.host is not None and isinstance(factor, torch.Tensor)
        arrived = arriving(factor) if moves else lambda: factor
        found_inf = self._found_inf
        found = arriving(found_inf) if self.partition.host is not None and found_inf is not None else None
        # For schedulers of torch, which warn if they step before the optimizer.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]

        def update(unit: Unit) -> Callable[[], None] | None:
            self.skip_if(None if found is None else found())
            return self.update_alone(unit, arrived(), options)

        for unit in units:
            postpone(unit, partial(update, unit), partial(self.announce, unit))

    def update(self, units: Sequence[Unit]) -> None:
        """Steps the optimizer. All other units than ``units`` have no gradient."""
        for unit in units:
            unit.before_change()
        self._lagging = units
        if self._rounded is None:
            self.optimizer.step()
        else:
            # For schedulers of torch, which warn if they step before the optimizer.
            self.optimizer._opt_called = True  # type: ignore[attr-defined]
            for unit in units:
                groups, state = self.optimizer.param_groups, self.optimizer.state
                self._rounded.step(unit, groups, state, found_inf=self._found_inf)
        if self._lagging:
            # Nothing has stepped the optimizer itself, or somebody replaced its step and thereby its hooks.
            self._follow()

    @property
    def _found_inf(self) -> torch.Tensor | None:
        """1 on the device if the optimizer's kernels shall change nothing; None if the host decides."""
        return getattr(self.optimizer, "found_inf", None)

    def skip_if(self, found_inf: torch.Tensor | None) -> None:
        """Tells the host's thread whether the updates that follow in it shall change nothing; 1 says so."""

    def learn_of_skip(self) -> None:
        """Tells that the optimizer's kernel has changed nothing in the last step."""
        if self._rounded is not None:
            # Its steps were counted ahead of the state.
            self._rounded.forget_counts()

    def leave_out_frozen(self, units: Sequence[Unit]) -> None:
        """Lets the next step leave alone what the script has frozen of ``units``, with its state. The gradients are
        final."""
        for unit in units:
            if unit.reduction.frozen:
                self.cut(unit, unit.reduction.frozen[0])
                unit.master.leave_out(unit.reduction.frozen)

    def cut(self, unit: Unit, frozen: UnitParameter) -> None:
        """Lets the optimizer hold each parameter of ``unit`` by itself, because ``frozen`` is or was frozen."""
        cut(self.optimizer, self.partition, unit)

    def announce(self, unit: Unit) -> None:
        """Tells that the host's thread is about to update ``unit``."""

    def update_alone(self, unit: Unit, factor: Any, options: Options) -> Callable[[], None] | None:
        """Steps the optimizer for ``unit`` alone and frees its gradient. The other units' gradients and states stay.
        Returns what waits until the update is on the disk; None without one.

        Args:
            factor: what multiplies the gradient.
            options: the hyper-parameters of the step, as far as they may have changed since.
        """
        unit.scale_gradient(factor)
        with self._groups_of([unit], options):
            self.update([unit])
        unit.drop_gradient()
        return None

    @staticmethod
    def shards_of(unit: Unit, group: int) -> list[torch.nn.Parameter]:
        """Returns the shards of ``unit`` that the optimizer's ``group`` owns."""
        return [segment.shard for segment in unit.master.segments if segment.group == group]

    @contextmanager
    def _groups_of(self, units: Sequence[Unit], options: Options) -> Iterator[None]:
        """Leaves only the shards of ``units`` in the optimizer's groups, and sets their ``options``."""
        groups = self.optimizer.param_groups
        before = []
        for index, group in enumerate(groups):
            own = {**options[index], "params": [shard for unit in units for shard in self.shards_of(unit, index)]}
            before.append({key: group[key] for key in own if key in group})
            group.update(own)
        try:
            yield
        finally:
            for group, values in zip(groups, before):
                group.update(values)

    def _follow(self, *_: Any) -> None:
        for unit in self._lagging:
            unit.follow_update()
            unit.after_update()
        self._lagging = ()


def twin_of(optimizer: torch.optim.Optimizer) -> Any:
    """Returns an optimizer with all attributes of ``optimizer`` but its hooks, and without what a scheduler or a script
    wrapped around its step."""
    # DeepSpeedCPUAdam would free its part in C++ a second time.
    kind = type(type(optimizer).__name__, (type(optimizer),), {"__del__": lambda self: None})
    twin: Any = object.__new__(kind)
    twin.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    return twin


def cut(optimizer: torch.optim.Optimizer, partition: ZeroPartition, unit: Unit) -> None:
    """Gives each parameter of ``unit`` a segment of its own, with its part of the state of ``optimizer``, which counts
    its steps by itself from now on. No update of the unit is under way."""
    if unit.master.is_cut:
        return
    wholes = unit.master.segments
    unit.master.cut()
    for whole in wholes:
        parts = [segment for segment in unit.master.segments if segment.is_within(whole)]
        group = optimizer.param_groups[whole.group]
        if isinstance(optimizer, torch.optim.SGD):
            # Its fused kernel fails if one parameter has momentum and another has none yet.
            group["fused"] = False
        shards = group["params"]
        index = next(index for index, shard in enumerate(shards) if shard is whole.shard)
        shards[index : index + 1] = [part.shard for part in parts]
        state = optimizer.state.pop(whole.shard, None)
        if state:
            for part in parts:
                optimizer.state[part.shard] = {key: _of_part(value, whole, part) for key, value in state.items()}
    if isinstance(optimizer, TensorOptimizer):
        optimizer.bind(partition)


def _of_part(value: Any, whole: Segment, part: Segment) -> Any:
    """Returns what of a ``value`` in the state of ``whole`` belongs to ``part``."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape == whole.shard.shape:
        value = value[part.start - whole.start : part.end - whole.start]
    return value.clone()


def _initial_state(optimizer: torch.optim.Optimizer, segments: Iterable[Segment]) -> defaultdict[torch.Tensor, Any]:
    """Returns the state of ``segments`` before their first step: none, except of Adagrad, which makes its state in its
    constructor. One with state of 8 bits learns which of them have 32."""
    if isinstance(optimizer, InEightBits):
        optimizer.watch(segments)
    if type(optimizer) is not torch.optim.Adagrad:
        return defaultdict(dict)
    value = optimizer.defaults["initial_accumulator_value"]
    groups = [{**group, "params": []} for group in optimizer.param_groups]
    for segment in segments:
        groups[segment.group]["params"].append(segment.shard)
    return torch.optim.Adagrad(groups, initial_accumulator_value=value).state
