"""A chunk at run time: consecutive layers, called one after another, for one micro-batch or for two that take turns."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from functools import cache, partial
from queue import SimpleQueue
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module
from torch.overrides import _pop_mode as pop_function_mode
from torch.overrides import _push_mode as push_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes
from torch.utils._python_dispatch import _pop_mode as pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as push_dispatch_mode
from torch.utils._pytree import tree_leaves, tree_map_only

from ds_lgamp.runtime.layer_state import LayerState
from ds_lgamp.runtime.recompute import RandomSource, read_states
from ds_lgamp.watch.this_rank import this_rank

Tensors = torch.Tensor | tuple[torch.Tensor, ...]
"""The value that a layer passes to the next one: a tensor or a tuple of tensors."""


class Chunk:
    """Consecutive layers of the model.

    Args:
        layers: modules or functions; each takes the result of the previous one. They may be replaced later.
        first_layer: index of the first layer in the model.
        before_layer: called with (layer index in the model, micro-batch) before every layer, for seeding.
        between_layers: applied to the input of every layer and to the result of the last one; None leaves them
            unchanged.
        after_layer: called with (layer index in the model, micro-batch, result) after every layer.
    """

    def __init__(
        self,
        layers: Sequence[Callable[[Any], Any]],
        first_layer: int = 0,
        before_layer: Callable[[int, int], None] | None = None,
        between_layers: Callable[[Any], Any] | None = None,
        after_layer: Callable[[int, int, Any], None] | None = None,
    ) -> None:
        self.layers = layers
        self.first_layer = first_layer
        self.before_layer = before_layer
        self.between_layers = between_layers
        self.after_layer = after_layer
        self.state = LayerState(_modules_of(layers, first_layer))

    def __call__(self, inputs: Any, micro_batch: int) -> Any:
        for index, layer in enumerate(self.layers, self.first_layer):
            if self.before_layer is not None:
                self.before_layer(index, micro_batch)
            if self.between_layers is not None:
                inputs = self.between_layers(inputs)
            inputs = layer(inputs)
            if self.after_layer is not None:
                self.after_layer(index, micro_batch, inputs)
        return inputs if self.between_layers is None else self.between_layers(inputs)


def _modules_of(layers: Sequence[Callable[[Any], Any]], first_layer: int) -> Iterator[tuple[str, Module]]:
    """Yields the modules of layers by names. A layer may also be a function of a module, as a tied one is called."""
    for index, layer in enumerate(layers, first_layer):
        for each in layer.args if isinstance(layer, partial) else (layer,):
            if isinstance(each, Module):
                for path, module in each.named_modules():
                    yield f"layer {index}.{path}".removesuffix("."), module


@runtime_checkable
class HasOwnLosses(Protocol):
    """A layer that adds the gradients of losses of its own in its backward pass, which no layer returns."""

    def scale_own_losses(self, factor: float) -> None:
        """Multiplies the gradients of these losses by ``factor`` from now on."""


@runtime_checkable
class HasArguments(Protocol):
    """An input of a chunk that is no tree of tensors, but has one, as a call of a model."""

    @property
    def arguments(self) -> Any: ...


def as_tuple(value: Tensors) -> tuple[torch.Tensor, ...]:
    """Returns ``value`` as a tuple of tensors. Raises TypeError if a link cannot carry it."""
    members = (value,) if isinstance(value, torch.Tensor) else value
    if not isinstance(members, tuple):
        raise TypeError(_refusal(value))
    for member in members:
        if not isinstance(member, torch.Tensor):
            raise TypeError(_refusal(value))
        if member.is_complex():
            raise TypeError("a chunk returned a complex tensor; return real ones, as from torch.view_as_real")
    return members


def differentiable(value: Tensors) -> list[torch.Tensor]:
    """Returns the members of ``value`` that carry gradients: the floating-point ones."""
    members = value if isinstance(value, tuple) else (value,)
    return [member for member in members if member.is_floating_point()]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors of a chunk's input or result."""
    tree = value.arguments if isinstance(value, HasArguments) else value
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def cloned(value: Any) -> Any:
    """Copies the tensors in ``value``. The copies are part of the graph."""
    if isinstance(value, tuple):
        return tuple(map(cloned, value))
    return value.clone() if isinstance(value, torch.Tensor) else value


def detached(value: Any) -> Any:
    """Returns the tensors in ``value`` without their graph."""
    if isinstance(value, tuple):
        return tuple(map(detached, value))
    return value.detach() if isinstance(value, torch.Tensor) else value


def detached_outputs(outputs: Any, copies: Callable[[torch.Tensor], bool]) -> Any:
    """Returns ``outputs`` of any structure with their tensors without a graph, and a copy of each tensor for which
    ``copies`` holds."""
    return tree_map_only(torch.Tensor, lambda each: each.detach().clone() if copies(each) else each.detach(), outputs)


def as_leaves(inputs: Tensors, marked: bool = False) -> Tensors:
    """Returns fresh leaves with the same data, whose gradients can be read after the backward pass.

    Args:
        marked: whether only members that require a gradient get one, instead of all floating-point ones.
    """
    members = inputs if isinstance(inputs, tuple) else (inputs,)
    leaves = tuple([member.detach().requires_grad_(needs_gradient(member, marked)) for member in members])
    return leaves if isinstance(inputs, tuple) else leaves[0]


def needs_gradient(member: torch.Tensor, marked: bool) -> bool:
    """Whether a member of a chunk's input gets a gradient: if it is ``marked`` by requiring one, or else if it is a
    floating-point tensor."""
    return member.requires_grad if marked else member.is_floating_point()


def passed_on(result: Tensors, copies: Callable[[torch.Tensor], bool] | None, marks: bool) -> Tensors:
    """Returns the tensors in ``result`` without their graph.

    Args:
        copies: tells which ones to copy.
        marks: whether those that require a gradient in ``result`` do so again.
    """
    value: Tensors = detached(result)
    if copies is not None:
        members = tuple(member.clone() if copies(member) else member for member in as_tuple(value))
        value = members if isinstance(value, tuple) else members[0]
    for member, source in zip(as_tuple(value), as_tuple(result)) if marks else ():
        member.requires_grad_(source.requires_grad)
    return value


def _refusal(value: object) -> str:
    described = type(value).__name__
    if isinstance(value, (list, tuple)):
        described += f" of {', '.join(sorted({type(member).__name__ for member in value}))}"
    return f"a chunk must return a tensor or a tuple of tensors, not {described}"


class _Abandoned(BaseException):
    """Ends the second compute because the first has failed. Layers that catch exceptions let it pass."""


class Turns:
    """Two computes, of which one runs at a time. They swap at exchanges alone, and the first one begins. So ranks that
    run the same two exchange in the same order.

    The first one runs on the caller's thread, in :meth:`first`. The second one runs on a thread of its own, with what
    torch and Python keep for the caller's thread; on an accelerator also on a stream of its own.

    Args:
        second: computes on ``inputs``, which the caller's stream has made.
        watch: tells whether the two disturb each other.
    """

    def __init__(self, second: Callable[[], None], inputs: Sequence[Tensor], watch: "Watch") -> None:
        self._may_run = threading.Semaphore(0), threading.Semaphore(0)
        self._over, self._abandoned = [False, False], False
        self._failure: BaseException | None = None
        self._watch = watch
        self._stream = _Stream(inputs)
        _thread().put(partial(copy_context().run, self._run_second, second, _ambient(inputs)))

    def first(self, compute: Callable[[], None]) -> None:
        """Runs the first compute, and raises what the second one has raised until then."""
        try:
            with self._of_this_thread(0):
                compute()
        except BaseException:
            self.abandon()
            raise

    def second(self) -> None:
        """Runs the second compute to its end, and raises what it has raised."""
        self._over[0] = True
        if not self._over[1]:
            self._let_run(1)
        if self._failure is not None:
            raise self._failure
        self._stream.join()
        self._watch.check()

    def has_raised(self, error: BaseException) -> bool:
        """Whether the second compute has."""
        return error is self._failure

    def abandon(self) -> None:
        """Ends the second compute where it is."""
        self._over[0] = self._abandoned = True
        # A signal may have ended the wait of the first one, so that both run until now.
        while not self._over[1]:
            self._let_run(1)

    def swap(self, own: int) -> None:
        """Lets the other compute run until its next exchange. ``own`` says which one calls: 0 or 1."""
        if not self._over[1 - own]:
            if self._watch.closely:
                self._watch.check()
            self._let_run(1 - own)
        if own == 1 and self._abandoned:
            raise _Abandoned
        if own == 0 and self._failure is not None:
            raise self._failure

    def _let_run(self, other: int) -> None:
        self._may_run[other].release()
        self._wait(1 - other)

    def _wait(self, own: int) -> None:
        self._may_run[own].acquire()
        # What this thread waits for is what the rank waits for.
        this_rank.whereabouts.thread = threading.get_ident()

    def _run_second(self, compute: Callable[[], None], ambient: Callable[[ExitStack], None]) -> None:
        self._wait(1)
        try:
            if not self._abandoned:
                with ExitStack() as entered:
                    ambient(entered)
                    entered.enter_context(self._stream.current())
                    entered.enter_context(self._of_this_thread(1))
                    compute()
        except BaseException as failure:
            self._failure = failure
        self._over[1] = True
        self._may_run[0].release()

    @contextmanager
    def _of_this_thread(self, own: int) -> Iterator[None]:
        _turn.swap = partial(self.swap, own)
        try:
            yield
        finally:
            _turn.swap = None


_turn = threading.local()
"""``swap`` lets the other one of two computes run; absent or None on a thread that takes no turns."""


@contextmanager
def exchanges_seen() -> Iterator[None]:
    """Lets computes that take turns swap at each ``torch.distributed.all_to_all_single`` inside the block."""
    all_to_all_single = dist.all_to_all_single

    def exchange(
        output: Tensor,
        input: Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        given = output, input, output_split_sizes, input_split_sizes, group
        swap = getattr(_turn, "swap", None)
        if swap is None or async_op:
            return all_to_all_single(*given, async_op)
        work = all_to_all_single(*given, True)
        swap()
        return None if work is None else work.wait()

    dist.all_to_all_single = exchange
    try:
        yield
    finally:
        dist.all_to_all_single = all_to_all_single


class Watch:
    """Finds out whether layers of a chunk have, since it was made, drawn random numbers or kept anything that another
    forward could find: two that take turns would get each other's.

    Args:
        number: that of the chunk.
        closely: whether to look at each exchange, too, where layers may keep what they then take away.
    """

    def __init__(self, chunk: Chunk, number: int, sources: Sequence[RandomSource], closely: bool) -> None:
        self.closely, self._number, self._sources = closely, number, sources
        self._states, self._changed = read_states(sources), chunk.state.watch(closely)

    def check(self) -> None:
        """Raises RuntimeError if they have."""
        pairs = zip(self._sources, self._states)
        drawn = [source.name for source, before in pairs if not source.same(before, source.read())]
        name = None if drawn else self._changed()
        if drawn:
            what, fix = f"draw or seed random numbers ({drawn[0]})", "switch dropout and noise off"
        elif name is not None:
            what, fix = f"change {name}", "let forwards leave it alone"
        else:
            return
        raise RuntimeError(
            f"layers of chunk {self._number} {what}, which two micro-batches that compute beside each other would mix "
            f"up; {fix}, or set ds_lgamp.overlap_exchanges to false"
        )


def _ambient(inputs: Sequence[Tensor]) -> Callable[[ExitStack], None]:
    """Returns what gives another thread what torch keeps for this one."""
    gradients, multithreading = torch.is_grad_enabled(), torch.autograd.is_multithreading_enabled()  # type: ignore[attr-defined]
    optimizes, caches = torch._C._get_graph_executor_optimize(), torch.is_autocast_cache_enabled()
    threads = torch.get_num_threads()
    kinds = {"cpu", *(each.device.type for each in inputs)}
    autocasts = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]
    functions = [torch._C._get_function_stack_at(place) for place in range(torch._C._len_torch_function_stack())]
    dispatches, hooks = dispatch_modes(), torch._C._autograd._top_saved_tensors_default_hooks(False)

    def enter(entered: ExitStack) -> None:
        torch.set_grad_enabled(gradients)
        torch.autograd.set_multithreading_enabled(multithreading)
        torch._C._set_graph_executor_optimize(optimizes)
        torch.set_autocast_cache_enabled(caches)
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        for kind, dtype, enabled in autocasts:
            torch.set_autocast_dtype(kind, dtype)
            torch.set_autocast_enabled(kind, enabled)
        if hooks is not None:
            entered.enter_context(saved_tensors_hooks(*hooks))
        # Entering a mode a second time would change it.
        for mode in functions:
            push_function_mode(mode)
            entered.callback(pop_function_mode)
        for mode in dispatches:
            push_dispatch_mode(mode)
            entered.callback(pop_dispatch_mode)

    return enter


class _Stream:
    """The stream of the second compute; on the CPU, nothing."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        device = next((each.device for each in inputs if each.device.type != "cpu"), None)
        self._module: Any = None if device is None else torch.get_device_module(device)
        if self._module is None:
            return
        self._device = device
        if device not in _streams:
            _streams[device] = self._module.Stream(device)
        self._own = _streams[device]
        self._own.wait_stream(self._module.current_stream(device))
        for each in inputs:
            # The caller's stream may take their memory once the caller drops them.
            each.record_stream(self._own)

    @contextmanager
    def current(self) -> Iterator[None]:
        if self._module is None:
            yield
            return
        with self._module.device(self._device), self._module.stream(self._own):
            yield

    def join(self) -> None:
        """Lets the caller's stream wait for this one."""
        if self._module is not None:
            self._module.current_stream(self._device).wait_stream(self._own)


_streams: dict[Any, Any] = {}


@cache
def _thread() -> SimpleQueue[Callable[[], Any]]:
    """Returns what the thread of second computes takes its work from. It stays, because the threads of OpenMP belong to
    the thread that computes."""
    waiting: SimpleQueue[Callable[[], Any]] = SimpleQueue()
    threading.Thread(target=_work, args=(waiting,), daemon=True, name="ds_lgamp second compute").start()
    return waiting


# A fork has no thread but its own.
os.register_at_fork(after_in_child=_thread.cache_clear)


def _work(waiting: SimpleQueue[Callable[[], Any]]) -> None:
    while True:
        waiting.get()()
