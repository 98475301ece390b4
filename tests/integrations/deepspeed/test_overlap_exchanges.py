"""With overlap_exchanges, models whose experts ranks divide train as without, to the bit, and compute while tokens
travel."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.moe import Mode as OwnMode
from tests.integrations.deepspeed.moe import refusal_on_rank
from tests.integrations.deepspeed.moe import train_on_rank as train_own_on_rank
from tests.integrations.deepspeed.test_auto_ep import DEEPSEEK, MIXTRAL, QWEN, Mode, train_on_rank

KEY = {"overlap_exchanges": True}


def course_of(ranks: int, mode: Mode, folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """Trains on ``ranks``. Returns losses and norms of gradients of every rank and step, and the trained weights."""
    courses = run_on_ranks(ranks, train_on_rank, mode, range(2), None, None, str(folder))
    weights = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    assert weights
    return courses, weights


DEFAULT = {"two ranks, stage 3": (2, Mode(MIXTRAL, 2, 1, 3))}
SLOW = {"two pipelines, stage 1": (4, Mode(DEEPSEEK, 2, 2, 1))} | {
    f"{name}, {mode}": (mode[0] * mode[1], Mode(name, *mode))
    for name in (MIXTRAL, QWEN, DEEPSEEK)
    for mode in [(2, 1, 0), (2, 1, 1), (2, 1, 2), (4, 1, 0), (4, 1, 3), (2, 2, 0), (2, 2, 2), (2, 2, 3)]
}
MORE = {
    "no recomputation": (2, Mode(QWEN, 2, 1, 2, {"block": {"recompute": "none"}})),
    "one more micro-batch than pairs": (2, Mode(MIXTRAL, 2, 1, 3, {"block": {"micro_batch_group": 3}})),
    "copies of experts": (4, Mode(DEEPSEEK, 2, 1, 2)),
    "all outputs": (4, Mode(MIXTRAL, 2, 2, 3, {"block": {"outputs": "all"}})),
    "bf16": (2, Mode(MIXTRAL, 2, 1, 3, {"bf16": {"enabled": True}})),
}


@pytest.mark.parametrize("case", [*DEFAULT, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW | MORE)])
def test_losses_gradients_and_weights_are_the_same_to_the_bit(case, tmp_path):
    ranks, mode = {**DEFAULT, **SLOW, **MORE}[case]
    more = dict(mode.config or {})
    beside = mode._replace(config={**more, "block": {**more.get("block", {}), **KEY}})
    (own, weights), (other, others) = course_of(ranks, beside, tmp_path / "beside"), course_of(ranks, mode, tmp_path)
    assert own == other
    assert weights.keys() == others.keys()
    assert all(torch.equal(value, others[name]) for name, value in weights.items())


def exchanges_on_rank(mode: Mode) -> list[str]:
    """Trains a step. Returns when tokens left and when this rank needed them, where it takes turns."""
    log: list[str] = []
    exchange = dist.all_to_all_single

    class Noted:
        def __init__(self, work: Any) -> None:
            self._work = work

        def wait(self) -> None:
            log.append("needed")
            self._work.wait()

    def noting(output: Any, input: Any, *rest: Any, **named: Any) -> Any:
        work = exchange(output, input, *rest, **named)
        # What travels in trials of the split, and in backwards, is waited for at once.
        if work is None or not input.is_floating_point():
            return work
        log.append("left")
        return Noted(work)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", noting)
        train_on_rank(mode, range(1))
    return log


def test_tokens_of_two_micro_batches_travel_before_the_first_ones_are_needed():
    mode = Mode(DEEPSEEK, 2, 1, 0, {"block": KEY})
    for log in run_on_ranks(2, exchanges_on_rank, mode):
        assert log[:3] == ["left", "left", "needed"]


def test_ranks_that_divide_no_experts_are_refused():
    mode = Mode(DEEPSEEK, 1, 1, 1, {"block": KEY})
    for told in run_on_ranks(2, refusal_on_rank, train_on_rank, mode):
        assert (
            "overlap_exchanges is True, but ranks divide no experts, so that no tokens travel; set autoep_size" in told
        )


def test_layers_of_deepspeed_moe_are_refused():
    mode = OwnMode(2, 1, 1, config={"block": KEY})
    for told in run_on_ranks(2, refusal_on_rank, train_own_on_rank, mode):
        assert "overlap_exchanges is True, but layers keep the loss that balances experts of one micro-batch" in told
