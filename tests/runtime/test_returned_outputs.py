"""Where the script computes the loss, the executor stops at each RETURN, and goes on from the gradients of outputs."""

import torch

from ds_lgamp.runtime.batch import BatchState
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.spec import ProgramSpec
from testing.ranks import run_on_ranks
from tests.runtime.assembly import assemble, build_grid
from tests.runtime.models import Model, Recording, build_model, micro_batch
from tests.schedule.strategies import pieces_of

CALLS = 3


class LateDropout(Recording):
    """Draws from the second step on."""

    def __init__(self):
        super().__init__()
        self.draws = False

    def forward(self, inputs):
        mask = (torch.rand_like(inputs) > 0.5).float() if self.draws else torch.ones_like(inputs)
        self.note(mask)
        return torch.tanh(inputs * mask)


def assembled_with(layers, bounds):
    spec = ProgramSpec((0,) * (len(bounds) - 1), "layered", CALLS, CALLS, zero_stage=1, returns_outputs=True)
    return spec, assemble(build_grid(1, 1), spec, Model(layers, False), bounds, lambda: None).executor


def step(spec, executor, turn=lambda call: None, gradient=lambda loss: torch.ones_like(loss)):
    """Runs a step, with the script's ``turn`` after each call."""
    (program,) = build_program(spec)
    batch = BatchState(CALLS, lambda index: micro_batch(0, index), program=program, returns_outputs=True)
    for call, piece in enumerate(pieces_of(program)):
        with executor.run_batch(batch):
            executor.run(piece)
        if call < CALLS:
            (loss,) = batch.losses
            assert not loss.requires_grad
            batch.losses.clear()
            batch.output_gradients[call] = [gradient(loss)]
            turn(call)
    return batch


def masks_of_two_steps():
    model, dropout = build_model(2, tied=False), LateDropout()
    spec, executor = assembled_with([model.layers[0], dropout, model.layers[-1]], [0, 3])
    step(spec, executor)
    dropout.draws = True
    dropout.drawn.clear()
    step(spec, executor, lambda call: torch.rand(3))
    return dropout.drawn


def test_a_layer_that_begins_to_draw_is_recomputed_whatever_the_script_draws_in_its_turn():
    (masks,) = run_on_ranks(1, masks_of_two_steps)
    assert len(masks) == 2 * CALLS
    for forward, recomputed in zip(masks[:CALLS], masks[CALLS:]):
        assert torch.equal(forward, recomputed)


def gradients_of(chosen):
    """Returns the gradients if the ``chosen`` calls have one of their loss, and how much the batch has left."""
    layers = build_model(2, tied=False).layers
    spec, executor = assembled_with(layers, [0, 2, len(layers)])
    seen, calls = [], iter(range(CALLS))
    executor._calls = executor._calls._replace(
        step=lambda: seen.extend(each.clone() for each in executor.partition.counted_gradients())
    )
    batch = step(spec, executor, gradient=lambda loss: torch.ones_like(loss) if next(calls) in chosen else None)
    return seen, len(batch.graphs) + len(batch.results) + len(batch.labels) + len(batch.output_gradients)


def gradients_of_each():
    return [gradients_of(chosen) for chosen in ((0, 1, 2), (0, 2), (1,))]


def test_a_call_without_a_gradient_adds_none_and_nothing_of_a_batch_is_left():
    found = run_on_ranks(1, gradients_of_each)[0]
    assert [left for _, left in found] == [0, 0, 0]
    for every, others, one in zip(*(gradients for gradients, _ in found)):
        assert every.abs().sum() > 0
        torch.testing.assert_close(others + one, every)


def evaluate_in_a_turn():
    layers = build_model(2, tied=False).layers
    spec, executor = assembled_with(layers, [0, 2, len(layers)])
    evaluation = spec.evaluation(1)
    losses = []

    def turn(call: int) -> None:
        batch = BatchState(1, lambda index: micro_batch(0, 5), training=False, program=build_program(evaluation)[0])
        with torch.no_grad(), executor.run_batch(batch):
            executor.run(batch.program)
        losses.extend(loss.item() for loss in batch.losses)

    step(spec, executor, turn)
    return losses


def test_the_script_evaluates_in_its_turn():
    (losses,) = run_on_ranks(1, evaluate_in_a_turn)
    assert len(losses) == CALLS and len(set(losses)) == 1
