"""Two micro-batches compute beside each other's exchanges as they would one after another."""

import multiprocessing
import sys
import traceback
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ds_lgamp.runtime.batch import ActionError, BatchState
from ds_lgamp.runtime.executor import Executor
from ds_lgamp.runtime.references import only_count
from ds_lgamp.schedule.actions import COMPUTE, STARTED
from ds_lgamp.schedule.program import build_rank_program
from ds_lgamp.schedule.spec import ProgramSpec
from tests.runtime.one_rank import one_rank, run

WIDTH = 8
MICRO_BATCHES = 5


class Exchange(torch.autograd.Function):
    """Sends everything to this rank itself, as the layers of hosts send tokens."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor) -> Tensor:
        arrived = torch.empty_like(tokens)
        torch.distributed.all_to_all_single(arrived, tokens)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return Exchange.forward(ctx, gradient)


class Experts(nn.Module):
    """A layer whose tokens travel twice, unless a micro-batch has none for other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        sent = Exchange.apply(self.inner(hidden).tanh())
        return hidden + Exchange.apply(self.outer(sent).relu())


class Sometimes(Experts):
    """Only micro-batches whose first number is above 0 travel."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) if hidden[0, 0] > 0 else self.outer(hidden)


class Network:
    """Stands for other ranks. A message arrives while it is waited for."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.sent = 0

    def all_to_all_single(self, output: Tensor, input: Tensor, *rest: Any) -> "Network.Work | None":
        number, is_async = self.sent, bool(rest and rest[-1])
        self.sent += 1
        self.log.append(f"send {number}")
        work = Network.Work(self, number, output, input)
        if is_async:
            return work
        work.wait()
        return None

    class Work:
        def __init__(self, network: "Network", number: int, output: Tensor, input: Tensor) -> None:
            self.network, self.number, self.output, self.input = network, number, output, input.detach().clone()

        def wait(self) -> None:
            self.network.log.append(f"arrive {self.number}")
            self.output.copy_(self.input)


def executor_of(make: Callable[[], nn.Module], layers: int = 2) -> tuple[Executor, list[nn.Module]]:
    torch.manual_seed(0)
    modules = [make() for _ in range(layers)]
    return one_rank([modules, [nn.Identity()]]), modules


def spec_of(micro_batches: int, overlaps: bool, recomputes: bool = True) -> ProgramSpec:
    counts = micro_batches, micro_batches
    return ProgramSpec((0, 0), "layered", *counts, 0, recomputes=recomputes, overlaps_exchanges=overlaps)


def step(executor: Executor, spec: ProgramSpec, load: Callable[[int], Tensor]) -> None:
    """Trains a step without data parallelism."""
    program = [action for action in build_rank_program(spec, 0) if action.kind in {*COMPUTE, *STARTED}]
    batch = BatchState(spec.micro_batches, lambda index: (load(index), None), program=program)
    with executor.run_batch(batch):
        executor.run(program)


def train(
    executor: Executor,
    overlaps: bool,
    recomputes: bool = True,
    count: int = MICRO_BATCHES,
    network: Network | None = None,
) -> Network:
    """Trains a step on inputs that are always the same."""
    draw = torch.Generator().manual_seed(1)
    inputs = [torch.randn(3, WIDTH, generator=draw) for _ in range(count)]
    network = network or Network()
    with (
        patch("torch.distributed.all_to_all_single", network.all_to_all_single),
        patch("torch.distributed.get_rank", return_value=0),
    ):
        step(executor, spec_of(count, overlaps, recomputes), inputs.__getitem__)
    return network


def outcome(make: Callable[[], nn.Module], overlaps: bool, recomputes: bool = True) -> list[Any]:
    """Returns losses, gradients and what the modules keep after two steps."""
    executor, modules = executor_of(make)
    losses = []
    for _ in range(2):
        train(executor, overlaps, recomputes)
        losses += [loss.item() for loss in executor.losses]
    tensors = [*nn.ModuleList(modules).named_buffers()]
    tensors += [(name, parameter.grad) for name, parameter in nn.ModuleList(modules).named_parameters()]
    return [*losses, *((name, tensor.tolist()) for name, tensor in tensors)]


@pytest.mark.parametrize("make", [Experts, Sometimes])
@pytest.mark.parametrize("recomputes", [True, False])
def test_losses_and_gradients_are_the_same_to_the_bit(make, recomputes):
    assert outcome(make, True, recomputes) == outcome(make, False, recomputes)


def test_the_first_computes_while_tokens_of_the_second_travel_and_the_other_way_round():
    log = train(executor_of(Experts, 1)[0], True, recomputes=False, count=2).log
    assert ", ".join(log[:8]) == "send 0, send 1, arrive 0, send 2, arrive 1, send 3, arrive 2, arrive 3"


def test_without_the_key_each_message_arrives_before_the_next_leaves():
    log = train(executor_of(Experts, 1)[0], False, recomputes=False, count=2).log
    assert log == [f"{what} {number}" for number in range(8) for what in ("send", "arrive")]


def test_repeated_forwards_take_turns_too():
    log = train(executor_of(Experts, 1)[0], True, count=2).log
    # After the four exchanges of the forwards.
    assert log[8:11] == ["send 4", "send 5", "arrive 4"]


class Counting(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("tokens_of_test", torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        sent = Exchange.apply(self.inner(hidden).tanh())
        with torch.no_grad():
            self.tokens_of_test.add_(1)
        return hidden + Exchange.apply(self.outer(sent).relu())


def test_what_only_counts_counts_each_micro_batch_once(monkeypatch):
    monkeypatch.setattr("ds_lgamp.runtime.references._COUNTS", set())
    only_count(["tokens_of_test"])
    found = outcome(Counting, True)
    assert found == outcome(Counting, False)
    assert [value for name, value in found[2 * MICRO_BATCHES :] if "tokens" in name] == [2 * MICRO_BATCHES] * 2


class Keeping(Experts):
    last: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.last = None

    def forward(self, hidden: Tensor) -> Tensor:
        self.last = hidden.detach()
        return super().forward(hidden)


class Dropping(Experts):
    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(hidden), 0.5)


class Writing(Counting):
    """Its buffer is no mere count."""


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (Dropping, r"draw or seed random numbers \(torch\)"),
        (Keeping, r"change layer 0\.last"),
        (Writing, r"change layer 0\.tokens_of_test"),
    ],
)
@pytest.mark.parametrize("recomputes", [True, False])
def test_layers_that_would_get_what_is_the_other_micro_batchs_are_refused(make, what, recomputes):
    with pytest.raises(ActionError, match=f"layers of chunk 0 {what}, .*set ds_lgamp.overlap_exchanges to false"):
        train(executor_of(make)[0], True, recomputes)


def test_forwards_that_are_repeated_anew_take_turns_too(monkeypatch):
    """As those of a process are that has compiled anything."""
    alone = outcome(Experts, False)
    monkeypatch.setattr("ds_lgamp.runtime.executor.has_compiled", lambda: True)
    assert outcome(Experts, True) == outcome(Experts, False) == alone


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


def test_a_failure_between_the_two_ends_the_second():
    executor, network = executor_of(Experts)[0], Network()
    inputs = [torch.ones(3, WIDTH)] * 2
    with patch("torch.distributed.all_to_all_single", network.all_to_all_single):
        # This executor has nothing to release.
        with pytest.raises(ActionError, match="failed at RELEASE0"):
            run(executor, inputs, "START_F0.1 F0.0 RELEASE0 F0.1", recompute=False)
    assert threads_that_wait() == 0


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


def test_a_step_leaves_no_random_states_of_micro_batches_behind():
    executor, _ = executor_of(Experts)
    train(executor, True)
    assert not executor.draws._visits


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
