"""With ``"outputs": "all"`` a script computes its loss from what the model returns, as without parallelism."""

from functools import cache

import pytest
import torch

from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.plain import scripts_loss
from tests.integrations.deepspeed.plain.scripts_loss import train_all_on_rank, train_alone
from tests.integrations.deepspeed.plain.test_equivalence import assert_equal, gathered
from tests.integrations.deepspeed.plain.training import MICRO_BATCHES, RATE
from tests.slow import slow_except

alone = cache(train_alone)
LAYOUTS = {(1, 1): (1, 3), (2, 1): (0, 3), (1, 2): (1, 3)}
"""Stages by pipeline and data-parallel ranks."""
NAMES = ("name", "loss", "pipeline", "data", "stage")
LOSSES = [("Llama with LoRA", "smoothed"), ("Llama", "of both"), ("GPT-2", "preferring")]
PLACES = [(pipeline, data, stage) for (pipeline, data), stages in LAYOUTS.items() for stage in stages]
CASES = [(*loss, *place) for place in PLACES for loss in LOSSES]
DEFAULT = [(*LOSSES[number % 3], *place) for number, place in enumerate(PLACES)]
"""Every place, and every loss at two of them."""


@pytest.fixture(scope="module")
def courses(request):
    """Returns a function that returns the courses of a case on all ranks."""

    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    calls = [item.callspec.params for item in items if "loss" in item.callspec.params]
    run = {tuple(call[name] for name in NAMES) for call in calls}

    @cache
    def of_layout(pipeline, data):
        own = [case for case in CASES if case in run and case[2:4] == (pipeline, data)]
        settings = [(name, loss, stage, {"pipeline_ranks": pipeline}) for name, loss, _, _, stage in own]
        ranks = run_on_ranks(pipeline * data, train_all_on_rank, settings)
        return {case: [courses[number] for courses in ranks] for number, case in enumerate(own)}

    return lambda *case: of_layout(*case[2:4])[case]


@pytest.mark.parametrize(NAMES, slow_except(DEFAULT, CASES, several=True))
def test_losses_and_gradients_are_those_of_one_process(name, loss, pipeline, data, stage, courses):
    expected, seen = alone(name, loss, pipeline * data), courses(name, loss, pipeline, data, stage)
    for course, wanted in zip(seen, expected):
        assert course.losses == pytest.approx(wanted.losses, rel=1e-6)
    for step, wanted in enumerate(expected[0].gradients):
        assert_equal(gathered(seen, step), wanted)


def test_recomputed_dropout_is_that_of_the_forward_whatever_the_script_draws_in_between():
    cuts = [{"recompute": recompute, **cut} for cut in ({}, {"chunks_per_rank": 1}) for recompute in ("none", "full")]
    [courses] = run_on_ranks(1, train_all_on_rank, [("GPT-2 with dropout", "noisy", 1, block) for block in cuts])
    for none, full in (courses[:2], courses[2:]):
        assert none.losses == full.losses
        for step, gradients in enumerate(none.gradients):
            assert all(torch.equal(full.gradients[step][name], gradient) for name, gradient in gradients.items())


def test_stage_3_gathers_for_every_call_and_reduces_once():
    calls = 3
    for chunks, counts in run_on_ranks(2, scripts_loss.count_launches, calls):
        assert counts == {"gather": chunks * (calls + 1), "reduce": chunks}


def test_mistakes_are_refused_on_every_rank():
    errors, others = run_on_ranks(2, scripts_loss.mistakes)
    for what, words in {
        "gradients lost": "zero_grad() is called after 1 micro-batches of a batch",
        "inside": "load_checkpoint is called inside a batch that is computed already; call it before the first",
        "no backward": "engine.step() is called, but no output of micro-batch 1 of the step has a gradient; call",
        "too late": "a gradient of an output of engine(...) arrives after its engine.step(); call engine.backward",
        "gradient of inputs": "an argument of engine(...) requires a gradient, which ds_lgamp.outputs 'all' would",
        "step alone": "rank 0 calls engine.step() with 1 calls whose outputs have no gradient, but rank 1 calls the "
        "engine for outputs of micro-batch 1 of a step",
        "nothing to step": "engine.step() is called, but no engine(...) since the last step",
        "ended": "rank 0 calls the engine for outputs of micro-batch 1 of a step, but rank 1 ended its script",
        "in evaluation": "engine.backward(loss) is called with a loss that has no gradient, as in evaluation",
        "no tensor": "the model returned a Hidden, in which no tensor is found; return tensors, tuples, dictionaries",
    }.items():
        assert words in errors[what]
        assert words in others[what]


@pytest.mark.parametrize(
    ("ranks", "block"), [(1, {"recompute": "none"}), (1, {}), (2, {}), (2, {"pipeline_ranks": 2, "chunks_per_rank": 1})]
)
def test_outputs_of_all_kinds_have_gradients_whichever_way_the_script_computes_them(ranks, block):
    model = scripts_loss.nested()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(2):
        for rank in range(ranks):
            for number in range(MICRO_BATCHES):
                loss = scripts_loss.of_nested(model, scripts_loss.inputs_of(step, rank, number))
                (loss / (ranks * MICRO_BATCHES)).backward()
        optimizer.step()
        optimizer.zero_grad()
    stages, ways = (0, 3) if block.get("pipeline_ranks") or ranks == 1 else (2, 3), list(scripts_loss.BACKWARDS)
    states = run_on_ranks(ranks, scripts_loss.train_nested, [(stage, block) for stage in stages], ways)[0]
    for state in states:
        assert state.keys() == model.state_dict().keys()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-7)


def test_gradients_of_outputs_are_freed_once_they_are_used():
    assert run_on_ranks(1, scripts_loss.memory_left) == [(0, 0)]


def test_the_loss_scale_of_fp16_is_in_every_backward_pass_or_missed():
    norms, error = run_on_ranks(1, scripts_loss.small_losses_in_fp16)[0]
    model = scripts_loss.nested()
    (model(scripts_loss.inputs_of(0, 0, 0))["gates"].sum() * 2.0**-20).backward()
    wanted = torch.nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None]).item()
    assert norms == pytest.approx([wanted] * 2, rel=1e-2)
    assert "loss.backward() is called, but fp16.enabled asks for a loss scale; call engine.backward(loss), or" in error
