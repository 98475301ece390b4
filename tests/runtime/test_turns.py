"""Two micro-batches compute beside each other's exchanges as they would one after another."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from ds_lgamp.cost.activations import ActivationBytes
from ds_lgamp.cost.memory import rank_memory
from ds_lgamp.cost.units import ElementBytes, Sharding
from ds_lgamp.runtime.batch import ActionError, BatchState
from ds_lgamp.runtime.executor import Executor
from ds_lgamp.runtime.measure import PeakMemory
from ds_lgamp.runtime.meter import ChunkMeter
from ds_lgamp.runtime.references import only_count
from ds_lgamp.schedule.actions import COMPUTE, STARTED
from ds_lgamp.schedule.program import build_rank_program
from ds_lgamp.schedule.spec import ProgramSpec
from tests.runtime.one_rank import one_rank

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


class Stacking(Experts):
    """Takes away what it has kept before anybody looks."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def forward(self, hidden: Tensor) -> Tensor:
        self.kept.append(hidden.detach())
        return super().forward(hidden) * self.kept.pop()


class Switching(Experts):
    def forward(self, hidden: Tensor) -> Tensor:
        self.inner.eval()
        result = super().forward(hidden)
        self.inner.train()
        return result


class Averaging(Experts):
    """Writes to a buffer unseen, as native batch norm does, and reads it after tokens of the other one have left."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((WIDTH,), torch.nan))

    def forward(self, hidden: Tensor) -> Tensor:
        self.mean.data.copy_(hidden.detach().mean(0))
        return super().forward(hidden) * self.mean


class Sampling(Experts):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.source = torch.Generator()

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden + torch.rand(WIDTH, generator=self.source))


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (Dropping, r"draw or seed random numbers \(torch\)"),
        (Keeping, r"change layer 0\.last"),
        (Writing, r"change layer 0\.tokens_of_test"),
        (Stacking, r"change layer 0\.kept"),
        (Switching, r"change which modules train"),
        (Averaging, r"change layer 0\.mean"),
        (Sampling, r"change layer 0\.source"),
    ],
)
@pytest.mark.parametrize("recomputes", [True, False])
def test_layers_that_would_get_what_is_the_other_micro_batchs_are_refused(make, what, recomputes):
    with pytest.raises(ActionError, match=f"layers of chunk 0 {what}, .*set ds_lgamp.overlap_exchanges to false"):
        train(executor_of(make)[0], True, recomputes)


def test_forwards_that_are_repeated_anew_take_turns_too(monkeypatch):
    """As those of a process are that has compiled anything."""
    alone = outcome(Experts, False)
    monkeypatch.setattr("ds_lgamp.runtime.passes.has_compiled", lambda: True)
    assert outcome(Experts, True) == outcome(Experts, False) == alone


def test_a_step_leaves_no_random_states_of_micro_batches_behind():
    executor, _ = executor_of(Experts)
    train(executor, True)
    assert not executor.draws._visits


ROWS = 2000


def bytes_of_step(overlaps: bool, recomputes: bool) -> tuple[int, int]:
    """Returns the most bytes of tensors that a step of three chunks makes, and what the formula says of them."""
    executor, network = one_rank([*([Experts(), Experts()] for _ in range(3)), [nn.Identity()]]), Network()
    spec = replace(spec_of(4, overlaps, recomputes), placement=(0,) * 4)
    meter = executor.meter = ChunkMeter()
    with patch("torch.distributed.all_to_all_single", network.all_to_all_single):
        step(executor, replace(spec, overlaps_exchanges=False), lambda _: torch.randn(ROWS, WIDTH))
        executor.meter = None
        with PeakMemory(only_new=True) as memory:
            step(executor, spec, lambda _: torch.randn(ROWS, WIDTH))
    size = ActivationBytes(ROWS * WIDTH * 4, 0, [meter.chunks[chunk] for chunk in range(4)])
    actions = [action for action in build_rank_program(spec, 0) if action.kind in {*COMPUTE, *STARTED}]
    return memory.peak, rank_memory(actions, (), Sharding(0, 1), ElementBytes(), size).peak


@pytest.mark.parametrize("recomputes", [True, False])
def test_a_step_takes_hardly_less_memory_than_the_formula_says_and_no_more(recomputes):
    measured, told = bytes_of_step(True, recomputes)
    # The second one cannot end before the first one has.
    assert 0.93 * told < measured < told * 1.001
    alone, _ = bytes_of_step(False, recomputes)
    assert measured > 1.2 * alone or not recomputes
