"""What live states take."""

import pytest

from ds_lgamp.cost.offload import LiveUse, live_use
from ds_lgamp.cost.units import ElementBytes, Sharding, UnitSize

ADAM = ElementBytes(weights=2, gradients=2, optimizer=8)
UNITS = [UnitSize(1_000_000, 1_000_000, (0,)), UnitSize(1_000_000, 0, (1,), frozen=True)]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_data_parallel_ranks_share_a_state_at_every_stage(stage):
    own = 1_000_000 / 4
    expected = LiveUse(held=2 * (12 + 2) * own, written=12 * own)
    assert live_use(UNITS, Sharding(stage, 4), ADAM, "step") == pytest.approx(expected, rel=1e-3)


def test_updates_ahead_of_the_step_take_a_third_state():
    two, three = (live_use(UNITS, Sharding(3, 2), ADAM, updates) for updates in ("next_step", "reduction"))
    assert three.held == two.held * 3 / 2 and three.written == two.written


def test_an_unknown_optimizer_takes_an_unknown_state():
    assert live_use(UNITS, Sharding(3, 2), ElementBytes(optimizer=None), "step") == LiveUse(None, None)
