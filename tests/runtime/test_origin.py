"""Where the first number that is not finite came from, by what ranks have seen."""

import pytest
import torch

from ds_lgamp.runtime.nonfinite import INPUTS, LABELS, FirstSeen, Origin, Seen, find_origin

NOTHING = Seen(0, 0, [], [], [], [], [])
LOSER = Seen(1, 0, [2, 3], [], [], [], [])
"""The rank of the loss, where the losses of micro-batches 2 and 3 are not finite."""


@pytest.mark.parametrize(
    ("ranks", "origin"),
    [
        ([NOTHING._replace(forward=[(2, 1), (2, 3), (3, 0)]), LOSER], Origin("forward", 0, 0, 2, 1)),
        # Scores behind a mask are infinite and spoil no loss.
        ([NOTHING._replace(forward=[(0, 0), (1, 0), (2, 3)]), LOSER], Origin("forward", 0, 0, 2, 3)),
        ([NOTHING._replace(forward=[(2, INPUTS), (2, 0)]), LOSER], Origin("inputs", 0, 0, 2)),
        ([NOTHING, LOSER._replace(forward=[(2, LABELS)])], Origin("labels", 1, 0, 2)),
        ([NOTHING, LOSER], Origin("loss", 1, 0, 2)),
        # The first micro-batch of all data-parallel ranks counts.
        (
            [NOTHING, LOSER, Seen(3, 1, [1], [(1, 2)], [], [], [])],
            Origin("forward", 3, 1, 1, 2),
        ),
        (
            [NOTHING._replace(forward=[(2, 1)], weights=["0.a", "1.b"]), LOSER],
            Origin("forward", 0, 0, 2, 1, "1.b"),
        ),
        ([NOTHING._replace(backward=[(1, 1), (1, 0), (2, 2)])], Origin("backward", 0, 0, 1, 2)),
        (
            [
                NOTHING._replace(backward=[(1, 0)]),
                LOSER._replace(losses=[], backward=[(1, 1)], gradients=["2.b", "1.a"]),
            ],
            Origin("backward", 1, 0, 1, 2, "2.b"),
        ),
        ([NOTHING._replace(backward=[(1, 3), (1, 2)])], Origin("loss backward", 0, 0, 1)),
        ([NOTHING, NOTHING._replace(rank=1, gradients=["3.b"])], Origin("gradient", 1, layer=3, parameter="3.b")),
        (
            [NOTHING._replace(gradients=["tied_modules.e.w"])],
            Origin("gradient", 0, parameter="tied_modules.e.w"),
        ),
        ([NOTHING], Origin("norm", 0)),
    ],
    ids=str,
)
def test_the_origin_is_what_first_made_loss_or_norm_not_finite(ranks, origin):
    assert find_origin(ranks, layers=4) == origin


def test_in_a_chunk_that_goes_forward_only_infinity_counts_in_hidden_states_and_not_in_masks():
    seen = FirstSeen([0, 1], torch.device("cpu"))
    seen.begin(1, lambda micro_batch: (None, None))
    infinite = torch.full((2,), torch.inf)
    with torch.no_grad():
        seen.after_layer(0, 0, (torch.ones(2), -infinite))
        seen.after_layer(1, 0, infinite)
    forward, _ = seen.end().squeeze(-1)
    assert forward[seen.places.index(0)].isfinite() and not forward[seen.places.index(1)].isfinite()


def test_results_of_an_evaluation_between_two_calls_are_not_noted():
    seen = FirstSeen([0], torch.device("cpu"))
    seen.begin(2, lambda _: (torch.ones(1), torch.ones(1)))
    with seen.looking_away():
        seen.after_layer(0, 0, torch.full((1,), torch.nan))
    seen.after_layer(0, 1, torch.full((1,), torch.nan))
    assert seen.end().isfinite()[0].tolist() == [[True, True], [True, True], [True, False]]
