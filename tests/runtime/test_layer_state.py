"""What modules count in forwards, they count once per micro-batch, and a recomputation finds it as the forward did."""

from collections import Counter, defaultdict, deque
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.weak import TensorWeakRef

from ds_lgamp.integrations.split.state import leave_out_hosts
from ds_lgamp.runtime.chunk import Chunk
from ds_lgamp.runtime.references import leave_out
from tests.runtime.one_rank import one_rank, run

LAYERED = "F0.0 F0.1 F0.2 F1.0 F1.1 F1.2 B1.0 B1.1 B1.2 B0.0 B0.1 B0.2"
ALTERNATING = "F0.0 F0.1 F1.0 B1.0 B0.0 F0.2 F1.1 B1.1 B0.1 F1.2 B1.2 B0.2"


class Meter:
    def __init__(self):
        self.count, self.seen = 0, []

    def __repr__(self):
        return f"{self.count} {self.seen}"


class Keeping(nn.Module):
    """Changes its state in every forward from the number ``first`` on, and computes with all of it."""

    def __init__(self, kind, first):
        super().__init__()
        self.kind, self.first = kind, first
        self.weight = nn.Parameter(torch.ones(()))
        self.forwards, self.ratio, self.word, self.turned, self.maybe = 0, 1.0, "", False, None
        self.some, self.named, self.once, self.last, self.counted = (
            [],
            {"inner": [1]},
            set(),
            deque(maxlen=2),
            Counter(),
        )
        self.tensor, self.tensors = torch.ones(()), [torch.ones(())]
        self.register_buffer("buffer", torch.ones(()))
        self.register_buffer("passing", torch.ones(()), persistent=False)
        self.register_buffer("absent", None)
        self.recent = deque([torch.ones(())])
        self.graph, self.meter, self.names, self.defaults = None, Meter(), SimpleNamespace(), defaultdict(list)
        self.norm = nn.BatchNorm1d(1, momentum=0.3)
        self._source = torch.Generator()

    def change(self, by):
        if self.kind == "number":
            self.ratio += by.item()
        elif self.kind == "word":
            self.word += "x"
        elif self.kind == "switch":
            self.turned = not self.turned
        elif self.kind == "none":
            self.maybe = 3.0 if self.maybe is None else None
        elif self.kind == "new":
            self.made = getattr(self, "made", 0) + 1
        elif self.kind == "removed" and hasattr(self, "turned"):
            del self.turned
        elif self.kind == "list":
            self.some.append(by.item())
        elif self.kind == "inner list":
            self.named["inner"][0] += 1
        elif self.kind == "dict":
            self.named[len(self.named)] = by.item()
        elif self.kind == "set":
            self.once.add(len(self.once))
        elif self.kind == "deque":
            self.last.append(by.item())
        elif self.kind == "tensor in a deque in place":
            self.recent[0].add_(by)
        elif self.kind == "counter":
            self.counted["forwards"] += 1
        elif self.kind == "dict with defaults":
            self.defaults[self.forwards].append(by.item())
            self.defaults.pop(self.forwards - 2, None)
        elif self.kind == "object":
            self.meter.count += 1
            self.meter.seen.append(by.item())
        elif self.kind == "namespace":
            self.names.made = self.forwards
        elif self.kind == "tensor":
            self.tensor = self.tensor + by
        elif self.kind == "tensor in place":
            self.tensor += by
        elif self.kind == "tensor made and then in place":
            self.maybe = by.clone() if self.maybe is None else self.maybe.add_(by)
        elif self.kind == "tensor now and then in place":
            self.tensor = self.tensor + by if self.forwards % 2 else self.tensor.add_(by)
        elif self.kind == "tensor in a list":
            self.tensors[0] = self.tensors[0] + by
        elif self.kind == "buffer":
            self.buffer = self.buffer + by
        elif self.kind == "buffer in place":
            self.buffer.mul_(0.5).add_(by)
        elif self.kind == "passing buffer in place":
            self.passing.add_(by)
        elif self.kind == "absent buffer":
            self.absent = by if self.absent is None else self.absent + by
        elif self.kind == "norm":
            self.norm(torch.stack([by, by * 2]).view(2, 1))
        elif self.kind == "own generator":
            self.ratio = torch.rand((), generator=self._source).item()

    def forward(self, inputs):
        self.forwards += 1
        if self.forwards >= self.first:
            self.change(inputs.detach().mean())
        numbers = [
            self.forwards,
            self.ratio,
            len(self.word),
            getattr(self, "turned", -1),
            0 if self.maybe is None else float(self.maybe),
            sum(self.some),
        ]
        numbers += [self.named["inner"][0], sum(value for key, value in self.named.items() if key != "inner")]
        numbers += [self.meter.count, sum(self.meter.seen), getattr(self.names, "made", 0)]
        numbers += [key + sum(value) for key, value in self.defaults.items()]
        numbers += [len(self.once), sum(self.last), self.counted["forwards"], getattr(self, "made", 0)]
        tensors = [self.tensor, *self.tensors, *self.recent, self.buffer, self.passing, self.norm.running_mean.sum()]
        if self.absent is not None:
            tensors.append(self.absent)
        factor = sum((0.1 + index / 100) * value for index, value in enumerate(numbers))
        factor = factor + sum((0.2 + index / 100) * tensor.clone() for index, tensor in enumerate(tensors))
        if self.kind == "graph read" and self.graph is not None:
            factor = factor + self.graph.detach().mean()
        result = torch.tanh(inputs * self.weight * factor)
        if self.forwards >= self.first and self.kind.startswith("graph"):
            self.graph = result
        return result

    def state(self):
        """Returns all that a forward may change, as numbers and words."""
        tensors = {name: tensor.tolist() for name, tensor in self.state_dict().items()}
        own = {key: value for key, value in vars(self).items() if not key.startswith("_")}
        return repr((tensors, own, self.passing, self.absent, self._source.get_state().tolist()))


KINDS = [
    *("number", "word", "switch", "none", "new", "removed", "list", "inner list", "dict", "set", "deque", "counter"),
    *("dict with defaults", "object", "namespace", "tensor in a deque in place"),
    *("tensor", "tensor in place", "tensor in a list", "buffer", "buffer in place", "passing buffer in place"),
    *("absent buffer", "norm", "tensor made and then in place", "tensor now and then in place", "graph", "graph read"),
    "own generator",
]
IN_PLACE_LATE = "was changed in place after a forward had left it alone"
OTHER_GRAPH = "is a tensor of another micro-batch's graph"
MAY_BE_REFUSED = {
    "tensor in place": IN_PLACE_LATE,
    "tensor in a deque in place": IN_PLACE_LATE,
    "passing buffer in place": IN_PLACE_LATE,
    "tensor now and then in place": IN_PLACE_LATE,
    "graph read": OTHER_GRAPH,
}


def trained(kinds, firsts, orders, recompute):
    """Returns losses, gradients and states after a batch of each order."""
    layers = [Keeping(kind, first) for kind, first in zip(kinds, firsts)]
    executor = one_rank([[layer] for layer in layers])
    losses = []
    for number, order in enumerate(orders):
        losses += run(executor, [torch.linspace(-1, 1, 3) + number + index for index in range(3)], order, recompute)
    return losses, [layer.weight.grad.item() for layer in layers], [layer.state() for layer in layers]


kinds = st.sampled_from(KINDS)
firsts = st.integers(1, 9)


@given(
    st.tuples(kinds, kinds),
    st.tuples(firsts, firsts),
    st.lists(st.sampled_from([LAYERED, ALTERNATING]), min_size=1, max_size=3),
)
@settings(max_examples=100, deadline=None)
def test_training_equals_that_without_recomputation(kinds, firsts, orders):
    expected = trained(kinds, firsts, orders, recompute=False)
    try:
        found = trained(kinds, firsts, orders, recompute=True)
    except RuntimeError as error:
        assert any(MAY_BE_REFUSED.get(kind, "nothing") in str(error) for kind in kinds)
    else:
        assert found == expected


@pytest.mark.parametrize("kind", sorted(MAY_BE_REFUSED))
def test_what_cannot_be_brought_back_is_refused(kind):
    with pytest.raises(
        RuntimeError, match=rf"layer 1\.[\w.]+ {MAY_BE_REFUSED[kind]}.* set ds_lgamp.recompute to 'none'"
    ):
        trained(("number", kind), (1, 3), [LAYERED, LAYERED], recompute=True)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in MAY_BE_REFUSED])
@pytest.mark.parametrize("first", [1, 5])
def test_what_can_be_brought_back_is_not_refused(kind, first):
    given = (kind, kind), (first, first), [ALTERNATING, LAYERED]
    assert trained(*given, recompute=True) == trained(*given, recompute=False)


class Sampling(nn.Linear):
    """Keeps nothing but a generator of its own."""

    def __init__(self):
        super().__init__(3, 3)
        self.source = torch.Generator()

    def forward(self, inputs):
        return super().forward(inputs) * torch.rand(3, generator=self.source)


@pytest.mark.parametrize("order", [LAYERED, ALTERNATING])
def test_a_generator_of_a_module_draws_the_same_again(order):
    found = []
    for recompute in (True, False):
        torch.manual_seed(0)
        layers = [Sampling(), Sampling()]
        losses = run(one_rank([[layer] for layer in layers]), [torch.ones(3)] * 3, order, recompute)
        found.append((losses, [(layer.weight.grad.tolist(), layer.source.get_state().tolist()) for layer in layers]))
    assert found[0] == found[1]


class Scripted(nn.Module):
    """Counts in attributes and a buffer of TorchScript."""

    steps: int
    sizes: list[int]

    def __init__(self):
        super().__init__()
        self.steps, self.sizes, self.total = 0, [0], torch.zeros(())
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("buffer", torch.ones(()))

    def forward(self, inputs):
        self.steps += 1
        self.sizes.append(self.steps)
        self.total = self.total + inputs.detach().sum()
        self.buffer.mul_(0.5)
        return torch.tanh(inputs * self.weight * self.buffer.clone() * (self.total + self.steps + len(self.sizes)))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_modules_of_torchscript_count_once_too():
    found = []
    for recompute in (False, True):
        layers = [torch.jit.script(Scripted()) for _ in range(2)]
        losses = run(one_rank([[layer] for layer in layers]), [torch.ones(2) / 9] * 3, ALTERNATING, recompute)
        found.append((losses, [layer.weight.grad for layer in layers], [layer.total for layer in layers]))
        found[-1] += ([(layer.steps, layer.sizes, layer.buffer.item()) for layer in layers],)
    assert found[0] == found[1]
    assert found[0][3][0] == (3, [0, 1, 2, 3], 0.125)


def test_a_buffer_that_changes_unseen_is_refused_at_last():
    """Nothing but its value shows that."""
    layer = Keeping("none", 1)
    chunk = Chunk([layer])
    with pytest.raises(RuntimeError, match="layer 0.buffer was changed unseen .* set ds_lgamp.recompute to 'none'"):
        for forward in range(64):
            layer.norm.running_mean.data.add_(1)  # As a script may do between forwards.
            before = chunk.state.read()
            chunk(torch.ones(3), 0)
            if forward > 5:
                layer.buffer.data.add_(1)
            chunk.state.moved(before)
    assert forward == 7


def test_a_tensor_of_a_graph_lives_no_longer_because_a_module_kept_it():
    layer = Keeping("graph", 1)
    chunk = Chunk([layer])
    moments, results = [], []
    for _ in range(3):
        moments.append(chunk.state.read())
        results.append(TensorWeakRef(chunk(torch.ones(3), 0)))
        chunk.state.moved(moments[-1])
    chunk.state.read()
    assert [result() is None for result in results] == [True, True, False]
    with pytest.raises(RuntimeError, match=OTHER_GRAPH):
        chunk.state.rewind(moments[1])
        layer.graph + 1
    layer.graph = None


def test_a_chunk_without_state_is_looked_at_and_copies_nothing():
    chunk = Chunk([nn.Linear(1, 1), partial(nn.functional.dropout, p=0.1)])
    moment = chunk.state.read()
    assert not moment.values and chunk.state.read().references is moment.references
    assert chunk.state.rewind(moment) is None


def test_the_state_of_a_module_behind_a_function_of_it_is_found():
    """As a tied module is called whose specification has a forward_fn."""
    layer = Keeping("number", 1)
    chunk = Chunk([partial(Keeping.forward, layer)])
    moment = chunk.state.read()
    chunk(torch.ones(3), 0)
    chunk.state.rewind(moment)
    assert layer.ratio == 1.0 and layer.forwards == 0


def test_only_modules_that_change_a_buffer_have_theirs_copied():
    constant = nn.Module()
    constant.register_buffer("mask", torch.ones(3))
    chunk = Chunk([lambda inputs: inputs, constant, nn.BatchNorm1d(3)])
    for _ in range(2):
        before = chunk.state.read()
        chunk.layers[2](torch.randn(2, 3))
        chunk.state.moved(before)
    copied = {before.references.tensors[place].name for place in chunk.state.read().values}
    assert copied == {"layer 2.running_mean", "layer 2.running_var", "layer 2.num_batches_tracked"}


class Decaying(nn.Linear):
    """Changes its weight in every forward."""

    def forward(self, inputs):
        with torch.no_grad():
            self.weight.mul_(0.9)
        return super().forward(inputs)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("kind", [Decaying, partial(nn.Embedding, max_norm=0.1)])
def test_a_parameter_that_a_forward_changes_is_refused(kind, frozen, recompute):
    layer = kind(3, 3)
    layer.weight.requires_grad_(not frozen)
    token = torch.tensor([1]) if isinstance(layer, nn.Embedding) else torch.ones(3)
    executor = one_rank([[layer, nn.Linear(3, 3)]])
    with pytest.raises(RuntimeError, match=r"layer 0\.weight is a parameter that a forward changes in place"):
        run(executor, [token], "F0.0 B0.0", recompute)


def test_values_are_compared_again_when_training_mode_begins():
    norm = nn.BatchNorm1d(3).eval()
    chunk = Chunk([norm])
    # The second and the fourth forward compare in any case.
    for training, number in ((False, 3), (False, 3), (False, 0), (True, 3), (True, 3)):
        norm.train(training)
        before = chunk.state.read()
        assert len(before.values) == number
        chunk(torch.randn(2, 3), 0)
        chunk.state.moved(before)
    chunk.state.rewind(before)
    assert norm.num_batches_tracked == 1


class Registering(nn.Module):
    """Registers something in its first forward, which a host keeps in an attribute and in an object of its own."""

    def __init__(self, attribute, kind):
        super().__init__()
        self.attribute, self.object = attribute, kind()
        setattr(self, attribute, False)
        self.object.count = 0

    def forward(self, hidden):
        setattr(self, self.attribute, True)
        self.object.count += 1
        return hidden


def test_what_hosts_keep_in_modules_is_no_state():
    class Kept:
        pass

    def counted(attribute, kind):
        chunk = Chunk([Registering(attribute, kind)])
        moments = []
        for _ in range(2):
            moments.append(chunk.state.read())
            chunk(torch.ones(1), 0)
            chunk.state.moved(moments[-1])
        chunk.state.rewind(moments[0])
        return getattr(chunk.layers[0], attribute), chunk.layers[0].object.count

    assert counted("_kept_by_a_host", Kept) == (False, 0)
    Kept.__module__ = "a_host.hooks"
    leave_out(["a_host"], ["_kept_by_a_host"])
    assert counted("_kept_by_a_host", Kept) == (True, 2)


def test_integrations_leave_out_what_transformers_keeps():
    leave_out_hosts()
    chunk = Chunk([Registering("_output_capturing_hooks_installed", SimpleNamespace)])
    before = chunk.state.read()
    chunk(torch.ones(1), 0)
    chunk.state.moved(before)
    chunk.state.rewind(before)
    assert chunk.layers[0]._output_capturing_hooks_installed and chunk.layers[0].object.count == 0
