"""Two computes that take turns: forwards of a chunk, or forwards that backwards repeat. While the tokens of one travel
among ranks that divide experts, the other one computes."""

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from functools import cache, partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import _pop_mode as pop_function_mode
from torch.overrides import _push_mode as push_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes
from torch.utils._python_dispatch import _pop_mode as pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as push_dispatch_mode

from ds_lgamp.runtime.chunk import Chunk, Moment, tensors_in
from ds_lgamp.runtime.recompute import RandomSource, read_states
from ds_lgamp.schedule.actions import STARTED, Action
from ds_lgamp.watch.this_rank import this_rank


class Second(NamedTuple):
    """The second of two computes beside each other."""

    action: Action
    state: Moment | None
    """What its action gets."""
    turns: "Turns"


class Pairs:
    """The computes of a rank that take turns, two by two.

    Args:
        chunks: those of the rank.
        sources: generators that layers must leave alone.
    """

    def __init__(self, chunks: Mapping[int, Chunk], sources: Sequence[RandomSource]) -> None:
        self._chunks, self._sources = chunks, sources
        self._begun = Counter[int]()
        """How many pairs of computes each chunk has begun."""
        self.started: Action | None = None
        """What the next compute begins beside itself."""
        self.second: Second | None = None
        """The second of two, once both have begun."""
        self.failed: Action | None = None
        """That second compute, if it has failed beside the first one."""

    def start(self, action: Action) -> None:
        """Lets the next compute begin the one that ``action`` names beside itself."""
        self.started = action._replace(kind=STARTED[action.kind])

    @contextmanager
    def taking_turns(self) -> Iterator[None]:
        """Lets computes take turns inside the block. None is left at its end, whatever ends it."""
        self.failed = None
        try:
            with exchanges_seen():
                yield
        except BaseException as error:
            if self.second is not None:
                self.second.turns.abandon()
                self.failed = self.second.action if self.second.turns.failure is error else None
            self.second = self.started = None
            raise

    def beside(
        self, inputs: Any, state: Moment | None, second: Callable[[], None], first: Callable[[], None]
    ) -> Callable[[], None]:
        """Returns what computes ``first``, beside which the ``second`` compute runs where tokens travel, on ``inputs``.
        Its own action computes the rest of that, and gets ``state``."""
        started, self.started = self.started, None
        assert started is not None, "START precedes the first of two computes"
        chunk, before = started.chunk, self._begun[started.chunk]
        self._begun[chunk] += 1
        # Looking takes time, and layers hardly begin late to keep what they take away again.
        watch = Watch(self._chunks[chunk], chunk, self._sources, closely=not before & (before + 1))
        self.second = Second(started, state, Turns(second, tensors_in(inputs), watch))
        return partial(self.second.turns.first, first)

    def take_second(self) -> tuple[Moment | None, Callable[[], None]]:
        """Returns what the second of two computes gets, and what computes the rest of it."""
        assert self.second is not None, "the first one has begun it"
        (_, state, turns), self.second = self.second, None
        return state, turns.second


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
        self.failure: BaseException | None = None
        """What the second compute has raised."""
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
        try:
            if not self._over[1]:
                self._let_run(1)
        except BaseException:
            self.abandon()
            raise
        if self.failure is not None:
            raise self.failure
        self._stream.join()
        self._watch.check()

    def abandon(self) -> None:
        """Ends the second compute where it is."""
        self._over[0] = self._abandoned = True
        if not self._over[1]:
            self._let_run(1)

    def swap(self, own: int) -> None:
        """Lets the other compute run until its next exchange. ``own`` says which one calls: 0 or 1."""
        if not self._over[1 - own]:
            if self._watch.closely:
                self._watch.check()
            self._let_run(1 - own)
        if own == 1 and self._abandoned:
            raise _Abandoned
        if own == 0 and self.failure is not None:
            raise self.failure

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
            self.failure = failure
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
