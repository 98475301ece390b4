"""A batch is complete only at its last call. Until then, a script may reuse the containers of its micro-batches, but a
change of anything else that counts is refused."""

import pytest

from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.plain import reusing

OUTPUTS = [{}, {"outputs": "all"}]


@pytest.mark.parametrize("kind", reusing.CONTAINERS)
@pytest.mark.parametrize("block", OUTPUTS, ids=["the loss", "all outputs"])
def test_a_script_may_reuse_its_containers(kind, block):
    block = {**block, "pipeline_ranks": 2}
    assert run_on_ranks(2, reusing.train_from_one_container, kind, block) == pytest.approx(reusing.alone(2), rel=1e-6)


@pytest.mark.parametrize("change", reusing.CHANGES)
@pytest.mark.parametrize("block", OUTPUTS, ids=["the loss", "all outputs"])
def test_settings_may_change_between_batches_but_not_between_calls(change, block):
    [(error, total)] = run_on_ranks(1, reusing.change_between_calls, change, block)
    if change == "object":
        assert "micro-batch 0 of 2 was changed after engine(...) got it" in error
    else:
        assert (
            f"the attribute '{'...' if change == 'new' else change}' of the model was changed after micro-batch 0"
            in error
        )
    [plain] = reusing.alone(1)
    if change != "p":
        assert total == pytest.approx(plain * (2 if change in ("temperature", "scale") else 1), rel=1e-6)
