"""With recompute "auto", layers that can recompute a part of themselves do so where memory is short, before their chunk
is recomputed as a whole."""

import gc
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ds_lgamp.fields import parse_quantity
from ds_lgamp.integrations.deepspeed.explain.activations import measure_activations
from ds_lgamp.runtime.batch import ActionError
from ds_lgamp.schedule.actions import Kind
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.engine.test_budget import SCALARS, STATE_BYTES, auto, gradients_with, program_of
from tests.integrations.deepspeed.engine.test_recompute import (
    ATTENDING,
    MICRO_BATCHES,
    WIDTH,
    Attending,
    engine,
    gradients_and_peak_of,
    gradients_of,
    mean_square,
    micro_batch,
)

BUDGETS = ("1.1 MB", "1.2 MB", "3 MB", "5 MB", "20 MB")


def numbers_of(trained):
    """Returns how many forwards the next step recomputes on this rank, and how many others in part."""
    backwards = [action for action in program_of(trained) if action.kind is Kind.BACKWARD]
    return sum(action.recomputed for action in backwards), sum(action.selective for action in backwards)


def switches(trained):
    return [layer.recompute_selectively for layer in trained.module.forward_funcs]


def steps_within(budgets):
    """Returns gradients of a step with everything recomputed; and by budget, also its peak, the peak by the formula,
    how many forwards it recomputes whole and in part, and whether its layers recompute afterwards."""
    prepare_rank()
    full, found = engine(ATTENDING, 1), {}
    gradients_of(full)
    expected = gradients_of(full)
    for budget in budgets:
        trained = auto(ATTENDING, 1, budget)
        gradients_of(trained)
        told, _ = trained.lgamp.budget._follow(program_of(trained))
        measured = gradients_and_peak_of(trained)
        found[budget] = (*measured, told.peak - told.weights, numbers_of(trained), any(switches(trained)))
        del trained
        gc.collect()
    return expected, found


def test_more_memory_recomputes_first_parts_of_all_chunks_and_then_nothing():
    """The peak stays within any budget, and gradients are equal to the bit. The formula is as far from the peak as with
    everything kept, by the batch, which the test holds, too."""
    ((expected, found),) = run_on_ranks(1, steps_within, BUDGETS)
    _, peak_of_none, told_of_none, *_ = found[BUDGETS[-1]]
    beside = told_of_none - peak_of_none
    assert 0 <= beside < 0.01 * told_of_none
    for budget, (gradients, peak, told, (whole, _), still_on) in found.items():
        assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients.items()), budget
        assert max(peak, told) <= parse_quantity("budget", budget, "bytes"), budget
        assert abs(told - peak - beside) <= STATE_BYTES * whole, (budget, peak, told)
        assert not still_on, "between steps, layers are as the script has made them"
    numbers = [found[budget][3] for budget in BUDGETS]
    assert all(more >= less for more, less in pairwise(numbers)), numbers
    assert numbers[0][0] > 0 and numbers[1] == (0, 5 * MICRO_BATCHES) and numbers[-1] == (0, 0), numbers
    assert 0 < numbers[3][1] < numbers[2][1] < 5 * MICRO_BATCHES, numbers


def one_micro_batch_and_longer_ones():
    """Returns, for every batch, how many forwards the next one recomputes whole and in part."""
    prepare_rank()
    trained, numbers = auto(ATTENDING, 1, "200 kB"), []
    trained.module.dynamic_shape = True
    for tokens in (40, 40, 40, 60, 60, 60):
        gradients_with(trained, tokens, 1)
        numbers.append(numbers_of(trained))
    return numbers


def test_what_layers_leave_is_known_when_an_input_of_the_largest_size_has_come_twice():
    """With one micro-batch, that is after the second batch. Before, chunks are recomputed whole or not at all."""
    (numbers,) = run_on_ranks(1, one_micro_batch_and_longer_ones)
    (first, second, third), (longer, again, last) = numbers[:3], numbers[3:]
    assert first[1] == 0 < first[0]
    assert second == third and second[1] > 0 and second[0] < first[0]
    assert longer[1] == 0 and again == last and last[1] > 0


def measured_beside_explained():
    prepare_rank()
    trained = auto(ATTENDING, 1, "1 GB")
    gradients_of(trained)
    layers = [Attending() for _ in ATTENDING]
    module = SimpleNamespace(_layer_specs=layers, loss_fn=mean_square)
    core = trained.lgamp
    given = module, layers, range(len(layers) + 1), micro_batch(0), core.program_spec, core.settings, core.config
    return core.budget._size, measure_activations(*given)


def test_the_first_batch_measures_of_layers_what_fake_tensors_tell():
    ((measured, told),) = run_on_ranks(1, measured_beside_explained)
    for chunk in range(len(ATTENDING) - 1):
        found, right = measured.chunks[chunk].selective, told.chunks[chunk].selective
        assert (found.result, found.backward, found.keeps_result) == (right.result, right.backward, right.keeps_result)
        assert abs(found.saved - right.saved) <= SCALARS and abs(found.forward - right.forward) <= SCALARS, chunk
        assert found.saved < measured.chunks[chunk].kept.saved / 10


class Repeating(Attending):
    """Recomputes attention together with the product before it."""

    options = {"use_reentrant": False}

    def forward(self, inputs):
        if self.recompute_selectively and torch.is_grad_enabled():
            return inputs + checkpoint(self.part, inputs, **self.options)
        return inputs + self.part(inputs)

    def part(self, inputs):
        return self.attend(self.mix(inputs))


class Counting(Repeating):
    """Counts in the part that it recomputes."""

    calls = 0

    def part(self, inputs):
        self.calls += 1
        return super().part(inputs)


class Normed(Repeating):
    """Has a batch norm in the part that it recomputes."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(WIDTH)

    def part(self, inputs):
        return super().part(self.norm(inputs.transpose(1, 2)).transpose(1, 2))


class Redrawing(Repeating):
    """Drops others when it recomputes a part of itself."""

    options = {"use_reentrant": False, "preserve_rng_state": False}


class Losing(Repeating):
    """Loses gradients of weights where its input needs none, as that of the first layer."""

    options = {"use_reentrant": True}


def refusals(kinds):
    prepare_rank()
    found = []
    for kind in kinds:
        trained = auto([kind] * 3, 1, "1 GB")
        with pytest.raises(ActionError) as refusal:
            gradients_of(trained)
        assert not any(switches(trained))
        found.append(str(refusal.value))
    return found


def test_parts_that_do_not_repeat_their_forward_are_refused():
    """The numbers of a step would depend on the budget."""
    (found,) = run_on_ranks(1, refusals, [Counting, Normed, Redrawing, Losing])
    counted, normed, drawn, lost = found
    assert "layer 2.calls changed when a layer recomputed a part of itself; let it leave that alone" in counted
    assert "layer 2.norm.num_batches_tracked changed when a layer" in normed
    assert "other random numbers were drawn (torch) when a layer recomputed a part of itself; let it restore" in drawn
    assert "layer 0.mix.weight got no gradient when a layer recomputed a part of itself; let it use torch.util" in lost


def switched_by_the_script():
    """Returns the switches after a step, and after one before which the script has set some of them."""
    prepare_rank()
    trained, found = auto(ATTENDING, 1, "1.2 MB"), []
    for on in (False, True, False):
        for layer in trained.module.forward_funcs[::2]:
            layer.recompute_selectively = on
        gradients_of(trained)
        found.append((switches(trained), numbers_of(trained)[1]))
    return found


def test_switches_stay_as_the_script_sets_them():
    (found,) = run_on_ranks(1, switched_by_the_script)
    assert [on for on, _ in found] == [[False] * 6, [True, False] * 3, [False] * 6]
    assert all(in_part > 0 for _, in_part in found)


class Routing(Repeating):
    """Takes another weight in some micro-batches."""

    def __init__(self):
        super().__init__()
        self.other = torch.nn.Linear(WIDTH, WIDTH)

    def part(self, inputs):
        return super().part(inputs) if inputs[0, 0, 1] > 0 else self.attend(self.other(inputs))


def routed():
    """Returns whether gradients of three batches are those of an engine that recomputes everything, and how many
    forwards the last one has recomputed in part."""
    prepare_rank()
    engines, found = [engine([Routing] * 6, 1), auto([Routing] * 6, 1, "1.2 MB")], []
    for _ in range(3):
        expected, gradients = map(gradients_of, engines)
        found.append(all(torch.equal(gradients[name], each) for name, each in expected.items()))
    return found, numbers_of(engines[1])[1]


def test_weights_may_get_gradients_in_some_micro_batches_only():
    ((found, in_part),) = run_on_ranks(1, routed)
    assert found == [True] * 3 and in_part > 0


class Choosing(Repeating):
    """Recomputes nothing of the second micro-batch."""

    def forward(self, inputs):
        if torch.equal(inputs, micro_batch(1)[0]):
            return inputs + self.part(inputs)
        return super().forward(inputs)


def most_of_several():
    prepare_rank()
    trained = auto([Choosing] * 3, 1, "20 MB")
    gradients_of(trained)
    size = trained.lgamp.budget._size
    return size.chunks[0].selective.saved, size.chunks[0].kept.saved


def test_of_several_forwards_that_tell_the_largest_counts():
    """The first two of the batch differ, and the third is as the first."""
    ((in_part, whole),) = run_on_ranks(1, most_of_several)
    assert in_part >= 0.9 * whole


def frozen_between_batches():
    """Freezes a weight after the batch that measures, ahead of the one that tells what layers leave in part. Returns
    whether gradients are those of an engine that recomputes everything."""
    prepare_rank()
    engines, found = [engine(ATTENDING, 1), auto(ATTENDING, 1, "200 kB")], []
    for number in range(3):
        for each in engines if number == 1 else ():
            each.module.forward_funcs[2].mix.requires_grad_(False)
        expected, gradients = (gradients_with(each, 40, 1) for each in engines)
        found.append(all(torch.equal(gradients[name], each) for name, each in expected.items()))
    return found, numbers_of(engines[1])[1]


def test_a_weight_that_was_frozen_may_get_no_gradient():
    ((found, in_part),) = run_on_ranks(1, frozen_between_batches)
    assert found == [True] * 3 and in_part > 0
