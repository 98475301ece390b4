"""In Megatron-core's loop, head and loss in pieces of rows train as whole logits do."""

import pytest

from testing.pieces import watch_pieces
from testing.ranks import run_on_ranks
from tests.integrations.megatron.training_loop import STOCK, Place, Step, prepare_process, train_all
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


def test_sliced_vocabularies_and_tokens_without_a_piece_are_left_alone():
    sliced = Place(1, 4, "layered", tensor_ranks=2, loss_chunk=PIECE)
    for [(steps, pieces)] in run_on_ranks(2, train_in_pieces, [sliced], before_init=prepare_process):
        assert steps and not pieces
