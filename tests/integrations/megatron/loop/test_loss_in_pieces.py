"""In Megatron-core's loop, head and loss in pieces of rows train as whole logits do."""

import pytest
import torch

from testing.pieces import watch_pieces
from testing.ranks import run_on_ranks
from tests.integrations.megatron.training_loop import STOCK, Place, Step, Training, prepare_process, train_all
from tests.slow import slow_except

PIECE = 3
FUSED = (("gradient_accumulation_fusion", True),)
ALONE = {
    "tied": Place(1, 1, STOCK),
    "untied": Place(1, 1, STOCK, tied=False),
    "per token": Place(1, 1, STOCK, per_token=True),
    "a fused cross entropy": Place(1, 1, STOCK, options=(("cross_entropy_loss_fusion", True),)),
    "fused gradients": Place(1, 1, STOCK, options=FUSED),
    "bf16": Place(1, 1, STOCK, options=(("bf16", True),)),
}
DEFAULT = ("tied", "untied", "per token", "a fused cross entropy")
ON_TWO = [
    Place(2, 4, "layered", tied=False, loss_chunk=PIECE),
    Place(2, 1, "gpipe", tied=False, loss_chunk=PIECE),
    Place(1, 4, "layered", tied=False, data_ranks=2, distributed_optimizer=True, loss_chunk=PIECE),
    Place(1, 4, "layered", tied=False, data_ranks=2, zero_stage=3, loss_chunk=PIECE),
]


def train_in_pieces(places: list[Place]) -> list[tuple[list[Step], list[int]]]:
    found = []
    for place in places:
        with pytest.MonkeyPatch.context() as patch:
            pieces = watch_pieces(patch.setattr)
            found.append((train_all([place])[place], pieces))
    return found


def losses_and_norms(steps):
    return [(step.loss, step.norm) for step in steps]


OTHERS = tuple(kind for kind in ALONE if kind not in DEFAULT)


@pytest.mark.parametrize("kinds", slow_except([DEFAULT], [DEFAULT, OTHERS]), ids=["default", "others"])
def test_losses_and_norms_on_one_rank_are_those_of_whole_logits(kinds):
    whole = [ALONE[kind] for kind in kinds]
    cut = [place._replace(schedule="layered", loss_chunk=PIECE, chunks_per_rank=4) for place in whole]
    [found] = run_on_ranks(1, train_in_pieces, [*whole, *cut], before_init=prepare_process)
    for kind, (alone, none), (steps, pieces) in zip(kinds, found, found[len(kinds) :]):
        assert not none and pieces and max(pieces) == PIECE, kind
        tolerance = 2e-3 if kind == "bf16" else 1e-5
        wanted = [pytest.approx(step, rel=tolerance) for step in losses_and_norms(alone)]
        assert losses_and_norms(steps) == wanted, kind


@pytest.mark.parametrize("place", slow_except(ON_TWO[:1], ON_TWO))
def test_losses_and_norms_on_two_ranks_are_those_of_one_process(place):
    [[(alone, _)]] = run_on_ranks(1, train_in_pieces, [ALONE["untied"]], before_init=prepare_process)
    ranks = run_on_ranks(2, train_in_pieces, [place], before_init=prepare_process)
    assert any(pieces and max(pieces) == PIECE for [(_, pieces)] in ranks)
    for [(steps, _)] in ranks:
        assert losses_and_norms(steps) == [pytest.approx(step, rel=1e-5) for step in losses_and_norms(alone)]


SEQUENCES = (("sequence_parallel", True),)
SLICED = {
    Place(1, 4, "layered", tied=False, tensor_ranks=2, options=SEQUENCES, loss_chunk=PIECE): "untied",
    Place(1, 4, "layered", tensor_ranks=2, options=ALONE["a fused cross entropy"].options, loss_chunk=PIECE): (
        "a fused cross entropy"
    ),
    Place(1, 4, "layered", tied=False, tensor_ranks=2, options=FUSED, loss_chunk=PIECE): "untied",
    Place(2, 2, "layered", tensor_ranks=2, options=SEQUENCES, loss_chunk=PIECE): "tied",
}
"""Places with two slices of the vocabulary, and which one of :data:`ALONE` trains as they do."""


@pytest.mark.parametrize("place", slow_except([*SLICED][:2], [*SLICED]))
def test_losses_and_norms_on_ranks_with_slices_of_the_vocabulary_are_those_of_one_process(place):
    [[(expected, _)]] = run_on_ranks(1, train_in_pieces, [ALONE[SLICED[place]]], before_init=prepare_process)
    ranks = run_on_ranks(place.ranks, train_in_pieces, [place], before_init=prepare_process)
    assert all(max(pieces) == PIECE for [(_, pieces)] in ranks[-place.tensor_ranks :])
    for [(steps, _)] in ranks:
        assert losses_and_norms(steps) == [pytest.approx(step, rel=1e-5) for step in losses_and_norms(expected)]


def evaluate(places: list[Place]) -> list[tuple[float, int]]:
    """Returns the loss of an evaluation at every place, and the most rows that were computed together."""
    found = []
    for place in places:
        with pytest.MonkeyPatch.context() as patch:
            pieces, training = watch_pieces(patch.setattr), Training(place)
            with torch.no_grad():
                found.append((training.run_batch(0, forward_only=True), max(pieces, default=0)))
    return found


@pytest.mark.parametrize("tensor_ranks", slow_except([2], [1, 2]))
def test_evaluation_computes_losses_in_pieces(tensor_ranks):
    places = [Place(1, 4, "layered", tensor_ranks=tensor_ranks, loss_chunk=rows) for rows in (PIECE, 0)]
    for (found, most), (whole, none) in run_on_ranks(tensor_ranks, evaluate, places, before_init=prepare_process):
        assert found == pytest.approx(whole, rel=1e-6) and (most, none) == (PIECE, 0)


def gather_logits(place: Place) -> list[int]:
    """Trains with heads that gather logits. Returns the rows of pieces."""
    with pytest.MonkeyPatch.context() as patch:
        pieces, training = watch_pieces(patch.setattr), Training(place)
        for module in (module for model in training.models for module in model.modules()):
            if hasattr(module, "output_layer"):
                module.output_layer.gather_output = True
        training.train()
        return pieces


def test_a_head_that_gathers_its_logits_is_left_alone():
    """As of a GPTModel with ``parallel_output`` False."""
    place = Place(1, 4, "layered", tensor_ranks=2, loss_chunk=PIECE)
    assert run_on_ranks(2, gather_logits, place, before_init=prepare_process) == [[], []]
