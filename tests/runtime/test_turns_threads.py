"""The second one of two computes that take turns finds on its thread what the first one has, and ends with it."""

import multiprocessing
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ds_lgamp.runtime.batch import ActionError
from ds_lgamp.schedule.actions import Action, Kind
from ds_lgamp.watch.this_rank import this_rank
from tests.runtime.one_rank import run
from tests.runtime.test_turns import WIDTH, Experts, Network, executor_of, outcome, train

SETTING: ContextVar[str] = ContextVar("setting", default="none")


class Seeing(Experts):
    """Notes what Python and torch keep for the thread."""

    seen: list[Any]

    def forward(self, hidden: Tensor) -> Tensor:
        Seeing.seen.append((SETTING.get(), torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
        return super().forward(hidden)


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.nn.functional.linear
        return function(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten.tanh.default
        return function(*args, **(kwargs or {}))


def noting(packed: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    return pack


def test_both_micro_batches_have_the_callers_context():
    counts = []
    for overlaps in (True, False):
        Seeing.seen, packed = [], []
        executor, functions, operations = executor_of(Seeing)[0], Functions(), Operations()
        token = SETTING.set("mine")
        with (
            functions,
            operations,
            torch.autocast("cpu", torch.bfloat16),
            saved_tensors_hooks(noting(packed), lambda each: each),
        ):
            train(executor, overlaps, recomputes=False, count=4)
        SETTING.reset(token)
        assert set(Seeing.seen) == {("mine", True, True)}
        counts.append((len(Seeing.seen), functions.count, operations.count, len(packed)))
    assert counts[0] == counts[1]


class Looking(Experts):
    """Notes whether those who watch the rank look at the thread that computes, and how many threads it may use."""

    seen: list[Any]

    def __init__(self) -> None:
        super().__init__()
        self.unknown = torch.tensor(torch.nan)

    def forward(self, hidden: Tensor) -> Tensor:
        result = super().forward(hidden)
        looks = this_rank.whereabouts.thread == threading.get_ident()
        Looking.seen.append((threading.current_thread() is threading.main_thread(), looks, torch.get_num_threads()))
        return result


def test_who_watches_the_rank_looks_at_the_thread_that_computes():
    Looking.seen = []
    train(executor_of(Looking)[0], True, count=2, recomputes=False)
    assert [looks for _, looks, _ in Looking.seen] == [True] * 4
    assert this_rank.whereabouts.thread == threading.get_ident()


def test_both_compute_with_as_many_threads():
    """More of them would round otherwise."""
    before = torch.get_num_threads()
    try:
        for threads in (before + 1, before):
            torch.set_num_threads(threads)
            Looking.seen = []
            train(executor_of(Looking)[0], True, count=2, recomputes=False)
            assert {(on_main, number) for on_main, _, number in Looking.seen} == {(True, threads), (False, threads)}
    finally:
        torch.set_num_threads(before)


class Failing(Experts):
    """Fails in a micro-batch with a number above 100."""

    def forward(self, hidden: Tensor) -> Tensor:
        result = super().forward(hidden)
        if hidden.abs().max() > 100:
            raise ValueError("too large")
        return result


@pytest.mark.parametrize(("failing", "sent"), [(0, 4), (1, 5)])
def test_a_failure_surfaces_once_names_its_micro_batch_and_ends_both(failing, sent):
    """The first one fails at the end of the first layer, when either has sent twice; the second one a turn later."""
    inputs, network = [torch.ones(3, WIDTH), torch.ones(3, WIDTH)], Network()
    inputs[failing] *= 1000
    drawn, named = patch("torch.randn", side_effect=inputs), rf"failed at F0\.{failing}: ValueError: too large"
    with drawn, pytest.raises(ActionError, match=named) as error:
        train(executor_of(Failing)[0], True, count=2, network=network)
    assert isinstance(error.value.__cause__, ValueError)
    assert network.sent == sent
    # The thread of second computes is free again.
    assert outcome(Experts, True) == outcome(Experts, False)


@pytest.mark.parametrize(("failure", "raised"), [(ValueError, ActionError), (KeyboardInterrupt, KeyboardInterrupt)])
def test_a_failure_between_the_two_ends_the_second(failure, raised):
    executor, network = executor_of(Experts)[0], Network()
    executor.partition.release = Mock(side_effect=failure)
    inputs = [torch.ones(3, WIDTH)] * 2
    with patch("torch.distributed.all_to_all_single", network.all_to_all_single), pytest.raises(raised):
        run(executor, inputs, "START_F0.1 F0.0 RELEASE0 F0.1", recompute=False)
    assert executor.current == Action(Kind.RELEASE, 0)
    assert threads_that_wait() == 0


class Tidying(Failing):
    """Fails by itself where its compute is ended."""

    def forward(self, hidden: Tensor) -> Tensor:
        try:
            return super().forward(hidden)
        except BaseException as error:
            if isinstance(error, Exception):
                raise
            raise KeyError("left over") from error


def test_what_the_second_one_raises_because_it_is_ended_is_no_cause():
    inputs = [torch.full((3, WIDTH), 1000.0), torch.ones(3, WIDTH)]
    with patch("torch.randn", side_effect=inputs), pytest.raises(ActionError, match=r"failed at F0\.0: ValueError"):
        train(executor_of(Tidying)[0], True, count=2)


class Interrupted(Experts):
    """The user presses Ctrl-C while the second micro-batch computes, at the beginning of a layer or at its end."""

    at_end = False

    def forward(self, hidden: Tensor) -> Tensor:
        self.press(not self.at_end)
        result = super().forward(hidden)
        self.press(self.at_end)
        return result

    def press(self, now: bool) -> None:
        if now and threading.current_thread() is not threading.main_thread():
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(0.5)


@pytest.mark.parametrize(("at_end", "sent"), [(False, 2), (True, 4)])
def test_an_interrupt_ends_both_so_that_another_engine_trains(at_end, sent, monkeypatch):
    """In the first one's action or, at the end of the only layer, in the second one's."""
    monkeypatch.setattr(Interrupted, "at_end", at_end)
    network = Network()
    with pytest.raises(KeyboardInterrupt):
        train(executor_of(Interrupted, 1)[0], True, count=2, network=network)
    assert threads_that_wait() == 0 and network.sent == sent
    assert outcome(Experts, True) == outcome(Experts, False)


def threads_that_wait() -> int:
    """Returns how many threads are inside a second compute."""
    stacks = map(traceback.extract_stack, sys._current_frames().values())
    return sum(any(frame.name == "_run_second" for frame in stack) for stack in stacks)


def train_once() -> None:
    train(executor_of(Experts, 1)[0], True, recomputes=False, count=2)


def test_a_fork_has_a_thread_for_second_computes_too():
    train_once()
    fork = multiprocessing.get_context("fork").Process(target=train_once)
    fork.start()
    fork.join(60)
    fork.kill()
    assert fork.exitcode == 0
