"""What a model's own forward keeps in attributes counts once for every micro-batch. A trial leaves no traces."""

import copy
import itertools
from collections import Counter
from functools import partial
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.split.reached import named_outside
from ds_lgamp.integrations.split.state import Snapshot, untouched
from tests.integrations.split.own_models import WIDTH, Attention, Gpt, cross_entropy
from tests.integrations.split.splitting import layers_of
from tests.integrations.split.test_beside_arguments import batches, in_turn, trained
from tests.slow import examples


class WarmUp(nn.Module):
    """Has no parameters, so that no layer holds it. Scales by how often it was called."""

    def __init__(self):
        super().__init__()
        self.calls, self.seen = 0, []

    def forward(self, hidden):
        self.calls += 1
        self.seen.append(self.calls)
        return hidden * min(1.0, len(self.seen) / 10)


class Counting(Gpt):
    """Counts its calls, its tokens and its losses."""

    def __init__(self, counts):
        super().__init__()
        self.warm_up, self.counts, self.calls, self.tokens, self.losses, self.length = (
            WarmUp(),
            counts,
            0,
            {"all": 0},
            [],
            None,
        )

    def forward(self, tokens, labels):
        hidden = self.embedding(tokens)
        if "calls" in self.counts:
            self.calls += 1
            hidden = hidden * (1 + self.calls / 10)
        if "tokens" in self.counts:
            self.tokens["all"] += tokens.numel()
        if "module" in self.counts:
            hidden = self.warm_up(hidden)
        if "length" in self.counts:
            self.length = tokens.shape[1]
        loss = cross_entropy(self.head(self.through(hidden)), labels)
        if "losses" in self.counts:
            self.losses.append(loss.item())
        # Also after the blocks, where the code before them has run again.
        return loss * (1 + self.calls / 10) if "calls" in self.counts else loss

    @property
    def state(self):
        return self.calls, self.tokens, self.losses, self.length, self.warm_up.calls, self.warm_up.seen


SHAPES: list[int] = []
COUNTS = ["calls", "tokens", "module", "length", "losses"]


@settings(max_examples=examples(15), deadline=None)
@given(st.sets(st.sampled_from(COUNTS)), st.integers(1, 2))
def test_what_a_forward_counts_it_counts_once(counts, ranks):
    torch.manual_seed(0)
    model = Counting(counts)
    twin = copy.deepcopy(model)
    layers = layers_of(model, pipeline_ranks=ranks)
    for seed in range(2):
        losses, gradients = trained(twin, [twin(each, each) for each in batches(seed)])
        found, others = trained(model, in_turn(layers, batches(seed), ranks))
        assert found == pytest.approx(losses, rel=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(others[name], gradient, rtol=1e-5, atol=1e-7)
    if ranks == 1:
        assert model.state == (*twin.state[:2], pytest.approx(twin.state[2]), *twin.state[3:])


def test_what_counts_after_the_blocks_and_matters_before_them_is_refused():
    """The last layer runs for all micro-batches after all others."""

    class Adapting(Counting):
        def forward(self, tokens, labels):
            return super().forward(tokens, labels) * (1 + sum(self.losses))

    with pytest.raises(ConfigError, match="what the model returns depends on .* what an earlier call left"):
        layers_of(Adapting({"losses", "calls"}))


@pytest.mark.parametrize(
    ("ranks", "outputs", "warns"), [(1, "loss", True), (2, "loss", True), (1, "all", False), (2, "all", True)]
)
def test_an_attribute_that_a_script_may_read_too_late_is_named(ranks, outputs, warns, caplog):
    layers_of(Counting({"length"}), pipeline_ranks=ranks, outputs=outputs)
    assert ("the forward of Counting sets 'length'; a script that reads that" in caplog.text) == warns


def test_nothing_is_named_where_a_forward_sets_nothing(caplog):
    layers_of(Counting(set()), pipeline_ranks=2, outputs="all")
    assert caplog.text == ""


class Scaling(Attention):
    """Counts in an iterator. Its forward does not show it, its gradients do."""

    def __init__(self):
        super().__init__(causal=True)
        self.numbers = itertools.count()

    def forward(self, hidden):
        scaled = super().forward(hidden) * (1 + next(self.numbers) % 5)
        with torch.no_grad():
            scale = scaled.abs().mean()
        return scaled / scale


def test_a_counter_that_shows_only_in_recomputed_gradients_is_refused():
    model = Counting(set())
    model.blocks = nn.ModuleList(Scaling() for _ in range(3))
    with pytest.raises(ConfigError, match="the gradient of '.*' computes something else"):
        layers_of(model, recompute="full")
    layers_of(model, recompute="none")


class Noisy(Attention):
    """Multiplies by numbers that it draws, but only in training."""

    def __init__(self, draw, generator=None):
        super().__init__(causal=True)
        self.draw, self.generator = draw, generator

    def forward(self, hidden):
        hidden = super().forward(hidden)
        return hidden * self.draw(self.generator) if self.training else hidden


def test_a_global_that_only_has_the_name_of_an_attribute_is_no_state():
    class Reading(nn.Module):
        def forward(self, hidden):
            return hidden * self.COUNTS * len(SHAPES)

    assert [each.names for each in named_outside(Reading())] == [["SHAPES"]]


def drawn(generator):
    return torch.rand(WIDTH, generator=generator)


def through(draws):
    return lambda _: next(draws)


@pytest.mark.parametrize(
    "draws",
    [
        *(partial(itertools.cycle, scales) for scales in ([1, 2], [1, 2, 3], [1, 2, 3, 4])),
        lambda: iter(Random(0).random, None),
    ],
)
def test_what_blocks_draw_in_training_alone_is_refused_unless_it_can_be_drawn_again(draws):
    model = Counting(set())
    model.blocks = nn.ModuleList(Noisy(through(draws())) for _ in range(3))
    with pytest.raises(ConfigError, match="block 0 computes something else"):
        layers_of(model)


class Growing(Attention):
    """Multiplies in training by a tensor that is no buffer, and that grows with every call of so many."""

    def __init__(self, scale, every=1):
        super().__init__(causal=True)
        self.scale, self.every, self.calls = scale, every, 0

    def forward(self, hidden):
        scaled = super().forward(hidden) * self.scale.clone()
        if self.training:
            self.calls += 1
            if self.calls % self.every == 0:
                self.scale.mul_(1.5)
        return scaled


def test_a_trial_leaves_the_values_of_tensors_that_are_no_buffers():
    model = Counting(set())
    model.blocks = nn.ModuleList(Growing(torch.ones(1)) for _ in range(3))
    layers_of(model)
    assert [block.scale.item() for block in model.blocks] == [1.0] * 3


def test_a_tensor_that_several_blocks_change_in_training_is_refused():
    model, scale = Counting(set()), torch.ones(1)
    model.blocks = nn.ModuleList(Growing(scale) for _ in range(3))
    with pytest.raises(ConfigError, match="block 1 computes something else"):
        layers_of(model)


def test_layers_that_fail_in_training_where_the_model_does_not_are_refused():
    model = Counting(set())
    model.blocks = nn.ModuleList(Growing(torch.ones(1), every=2) for _ in range(3))
    with pytest.raises(ConfigError, match="fails with RuntimeError: layer 1.* after a forward had left it alone"):
        layers_of(model)


def test_a_trial_leaves_generators_of_modules_as_they_were():
    model = Counting(set())
    model.blocks = nn.ModuleList(Noisy(drawn, torch.Generator().manual_seed(seed)) for seed in range(3))
    layers_of(model)
    for seed, block in enumerate(model.blocks):
        assert torch.equal(block.generator.get_state(), torch.Generator().manual_seed(seed).get_state())


def test_a_hook_of_the_gradient_of_a_weight_of_both_ends_is_refused():
    model = Counting(set())
    model.head.weight = model.embedding.weight
    layers_of(model)
    model.head.weight.register_hook(torch.sign)
    with pytest.raises(ConfigError, match="a parameter of 'embedding' has a hook .* and is shared by what precedes"):
        layers_of(model)


def test_weights_that_are_tied_later_are_refused():
    model = Counting(set())
    layers = layers_of(model)
    model.head.weight = model.embedding.weight
    with pytest.raises(ConfigError, match="parameters of the Counting were tied after deepspeed.initialize"):
        layers.check_blocks()
    layers_of(model).check_blocks()


@pytest.mark.parametrize("change", ["swap", "copy", "remove"])
def test_blocks_that_are_moved_later_are_refused(change):
    model = Counting(set())
    layers = layers_of(model)
    layers.check_blocks()
    if change == "swap":
        model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]
    elif change == "copy":
        model.blocks[0] = copy.deepcopy(model.blocks[0])
    else:
        del model.blocks[-1]
    with pytest.raises(ConfigError, match=r"block 'blocks\.\d' of the model was replaced, moved or removed after"):
        layers.check_blocks()


class Leaving(Counting):
    """Leaves traces: an attribute, an element, a module in the place of another one, a hook, a value of a buffer."""

    def __init__(self):
        super().__init__(COUNTS)
        self.register_buffer("steps", torch.zeros(()))
        self.table = {"rows": [1]}
        self.activation = nn.GELU()

    def forward(self, tokens, labels):
        self.table["rows"].append(tokens.shape[0])
        self.new, self.activation = object(), nn.ReLU()
        return super().forward(tokens, labels)


class Observer:
    """Counts what hooks see: in attributes, a list, a tensor, and by being called."""

    def __init__(self):
        self.calls, self.seen, self.total = 0, [], torch.zeros(())

    def __call__(self, *_):
        self.calls += 1

    def observe(self, *_):
        self.calls += 1
        self.seen.append(self.calls)
        self.total.add_(1)


SEEN_BY_HOOKS = Counter()


def test_a_trial_takes_back_what_hooks_of_a_script_have_counted():
    model, observers, in_closure, calls = Counting(set()), [Observer(), Observer(), Observer()], [], 0

    def count(*_):
        nonlocal calls
        calls += 1
        in_closure.append(calls)
        SEEN_BY_HOOKS.update(["calls"])

    model.register_forward_hook(count)
    for block in model.blocks:
        block.register_forward_pre_hook(observers[0])
        block.register_forward_hook(observers[1].observe)
        block.register_full_backward_hook(partial(Observer.observe, observers[2]))
        next(block.parameters()).register_hook(count)
    layers_of(model, pipeline_ranks=2)
    assert (calls, in_closure, SEEN_BY_HOOKS) == (0, [], Counter())
    for each in observers:
        assert (each.calls, each.seen, each.total) == (0, [], 0)
    # The hooks are there, and count from then on.
    tokens = batches(0)[0]
    model(tokens, tokens)
    assert (calls, observers[0].calls, observers[1].total) == (1, len(model.blocks), len(model.blocks))


CALLS = 0


class Counted:
    """Counts in an attribute of the class, and in a slot of an object."""

    __slots__ = ("own",)
    calls = 0

    def __init__(self):
        self.own = 0


COUNTED = Counted()


def count_beside():
    """Counts where only a function of the script names it."""
    global CALLS
    CALLS += 1
    Counted.calls += 1
    COUNTED.own += 1


def test_a_trial_takes_back_what_functions_of_a_script_have_counted():
    class Calling(Counting):
        def forward(self, tokens, labels):
            count_beside()
            return super().forward(tokens, labels)

    layers_of(Calling(set()), pipeline_ranks=2)
    assert (CALLS, Counted.calls, COUNTED.own) == (0, 0, 0)


def test_a_trial_leaves_no_traces():
    model = Leaving()
    before = Snapshot(model.modules(), 3)
    values = {name: buffer.clone() for name, buffer in model.named_buffers()}
    layers_of(model)
    assert [name for _, name, _ in before.changed()] == []
    assert all(torch.equal(values[name], buffer) for name, buffer in model.named_buffers())
    assert isinstance(model.activation, nn.GELU)


def test_a_model_is_untouched_after_an_error():
    model = Leaving()
    (tokens, *_) = batches(0)
    with pytest.raises(ZeroDivisionError), untouched(model):
        model(tokens, tokens)
        model.steps += 1
        raise ZeroDivisionError
    assert model.table == {"rows": [1]} and not hasattr(model, "new") and model.steps == 0
