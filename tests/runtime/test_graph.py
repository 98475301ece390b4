"""What a chunk without recomputation keeps between its forward and backward pass."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from ds_lgamp.runtime.batch import ActionError, BatchState, Calls, Position, Storage
from ds_lgamp.runtime.chunk import Chunk
from ds_lgamp.runtime.executor import Executor
from ds_lgamp.runtime.graph import backpropagate, begin_graph, drop_unfinished, end_graph
from ds_lgamp.runtime.links import Links
from ds_lgamp.runtime.measure import PeakMemory
from ds_lgamp.schedule.actions import Action
from tests.runtime.one_rank import ALONE, WholeParameters

ELEMENTS = 4096


@pytest.mark.parametrize(
    ("layer", "saves_its_input"),
    [(lambda inputs: inputs + 1, False), (lambda inputs: inputs**2, True)],
    ids=["add", "square"],
)
def test_a_graph_holds_its_input_only_if_a_layer_saves_it(layer, saves_its_input):
    with PeakMemory([]) as memory:
        inputs = torch.ones(ELEMENTS)
        nbytes = inputs.nbytes
        leaf, inputs = begin_graph(inputs)
        ends = end_graph(layer(inputs))
        del inputs
        assert memory.live() == pytest.approx(nbytes * saves_its_input, abs=64)
        backpropagate(ends, [torch.ones(ELEMENTS)])
    assert torch.equal(leaf.grad, torch.full((ELEMENTS,), 2.0 if saves_its_input else 1.0))


def test_an_input_may_be_changed_in_place():
    leaf, inputs = begin_graph(torch.full((2,), 3.0))
    backpropagate(end_graph(inputs.mul_(5)), [torch.ones(2)])
    assert torch.equal(leaf.grad, torch.full((2,), 5.0))


def test_members_that_have_no_gradient_pass():
    mask = torch.ones(2, dtype=torch.bool)
    (leaf, _), (inputs, passed) = begin_graph((torch.ones(2), mask))
    assert passed is mask
    backpropagate(end_graph((inputs * passed, mask)), [torch.ones(2)])
    assert torch.equal(leaf.grad, torch.ones(2))


class Asks(torch.autograd.Function):
    """Notes in its backward whether autograd may change threads, and fails if it is told to."""

    answers: list[bool] = []

    @staticmethod
    def forward(ctx, inputs, fails):
        ctx.fails = fails
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        Asks.answers.append(torch._C._is_multithreading_enabled())
        if ctx.fails:
            raise ValueError("a layer fails")
        return gradient, None


@pytest.mark.parametrize("fails", [False, True])
def test_backward_passes_stay_on_their_thread_and_leave_the_scripts_own_as_they_are(fails, monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    executor = executor_of(lambda inputs: Asks.apply(inputs * torch.ones(1, requires_grad=True), fails))
    with pytest.raises(ActionError, match="a layer fails") if fails else nullcontext():
        with executor.run_batch(BatchState(1, lambda _: (torch.ones(1), None))):
            executor.run(map(Action.parse, ("F0.0", "B0.0")))
    # The pass that frees what a failed one has left is the script's.
    assert Asks.answers.pop() is False
    assert torch._C._is_multithreading_enabled()


@pytest.mark.parametrize("training", [False, True])
def test_a_batch_has_the_gradients_it_needs_whatever_the_script_has_enabled(training, monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    seen = []

    def layer(inputs):
        seen.append(torch.is_grad_enabled())
        return (inputs * torch.ones(1, requires_grad=True)).sum()

    executor = executor_of(layer)
    program = [
        Action.parse(text)._replace(recomputed=training) for text in (("F0.0", "B0.0") if training else ("F0.0",))
    ]
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            with executor.run_batch(BatchState(1, lambda _: (torch.ones(1), None), training, program)):
                executor.run(program)
            assert torch.is_grad_enabled() == enabled
    assert seen == [training] * len(program) * 2


class Doubled(torch.autograd.Function):
    """Twice its input, by a node of Python."""

    @staticmethod
    def forward(ctx, inputs):
        return inputs * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


@pytest.mark.parametrize(
    ("layer", "slope"),
    [
        (Doubled.apply, 2),
        (lambda inputs: (inputs * 3).split(2)[1], 3),
        (lambda inputs: (inputs * 3).mul_(2), 6),
        (lambda inputs: inputs.view(-1), 1),
    ],
    ids=["Python", "second of two", "in place", "view"],
)
def test_a_graph_ends_at_the_node_that_made_the_result_however_it_was_made(layer, slope):
    leaf, inputs = begin_graph(torch.ones(4))
    ends = end_graph(layer(inputs))
    del inputs
    gc.collect()
    # Not every torch keeps a node of Python alive by its edge.
    assert not isinstance(ends[0].node, torch._C._FunctionBase)
    count = 2 if slope == 3 else 4
    backpropagate(ends, [torch.ones(count)])
    assert torch.equal(leaf.grad[-count:], torch.full((count,), float(slope)))
    assert leaf.grad[:-count].eq(0).all()


def test_a_graph_may_end_at_a_parameter():
    weight = torch.nn.Parameter(torch.ones(2))
    backpropagate(end_graph(weight), [torch.full((2,), 3.0)])
    assert torch.equal(weight.grad, torch.full((2,), 3.0))


def fails_with_work_left():
    """Lets a backward pass fail ahead of an operation that has saved a tensor. Returns a reference to its memory."""
    saved = torch.ones(ELEMENTS, requires_grad=True) * 2
    loss = (saved * saved).sum() + Asks.apply(torch.ones(2, requires_grad=True), True).sum()
    memory = weakref.ref(saved.untyped_storage())
    with pytest.raises(ValueError, match="a layer fails"):
        backpropagate([loss], [torch.ones(())])
    return memory


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_what_a_failed_pass_has_left_is_freed(mode):
    memory = fails_with_work_left()
    gc.collect()
    assert memory() is not None
    with mode():
        drop_unfinished()
    assert memory() is None


def test_a_batch_that_fails_in_a_backward_pass_holds_no_memory_afterwards(monkeypatch):
    """A script may catch it, as it may run out of memory, and build a smaller engine."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    memory = []

    def layer(inputs):
        squared = (inputs * torch.ones(ELEMENTS, requires_grad=True)) ** 2
        memory.append(weakref.ref(squared.untyped_storage()))
        return (squared * squared).sum() + Asks.apply(torch.ones(2, requires_grad=True), True).sum()

    executor = executor_of(layer)
    with pytest.raises(ActionError, match="B0.0: ValueError: a layer fails"):
        with executor.run_batch(BatchState(1, lambda _: (torch.ones(ELEMENTS), None))):
            executor.run(map(Action.parse, ("F0.0", "B0.0")))
    gc.collect()
    assert memory[0]() is None


def test_a_layer_that_raises_stop_iteration_fails_instead_of_ending_the_scripts_loop(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    executor = executor_of(lambda inputs: next(iter(())))
    with pytest.raises(ActionError, match="F0.0: StopIteration"):
        with executor.run_batch(BatchState(1, lambda _: (torch.ones(ELEMENTS), None))):
            executor.run([Action.parse("F0.0")])


def executor_of(layer):
    """Runs a model of one layer on one rank."""
    links = Links(torch.device("cpu"), ALONE)
    calls = Calls(None, lambda: None)
    return Executor(Position((0,), 0), {0: Chunk([layer])}, Storage(WholeParameters()), links, calls, [])
