"""What modules count in forwards, they count once per micro-batch, and a recomputation finds it as the forward did."""

from collections import Counter, deque

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.runtime.one_rank import one_rank, run

LAYERED = "F0.0 F0.1 F0.2 F1.0 F1.1 F1.2 B1.0 B1.1 B1.2 B0.0 B0.1 B0.2"
ALTERNATING = "F0.0 F0.1 F1.0 B1.0 B0.0 F0.2 F1.1 B1.1 B0.1 F1.2 B1.2 B0.2"


class Keeping(nn.Module):
    """Changes its state in every forward from the number ``first`` on, and computes with all of it."""

    def __init__(self, kind, first):
        super().__init__()
        self.kind, self.first, self.inputs = kind, first, []
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
        self.norm = nn.BatchNorm1d(1, momentum=0.3)

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
        elif self.kind == "counter":
            self.counted["forwards"] += 1
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
        numbers += [len(self.once), sum(self.last), self.counted["forwards"], getattr(self, "made", 0)]
        tensors = [self.tensor, *self.tensors, self.buffer, self.passing, self.norm.running_mean.sum()]
        if self.absent is not None:
            tensors.append(self.absent)
        factor = sum((0.1 + index / 100) * value for index, value in enumerate(numbers))
        factor = factor + sum((0.2 + index / 100) * tensor.clone() for index, tensor in enumerate(tensors))
        return torch.tanh(inputs * self.weight * factor)

    def state(self):
        """Returns all that a forward may change, as numbers and words."""
        tensors = {name: tensor.tolist() for name, tensor in self.state_dict().items()}
        own = {key: value for key, value in vars(self).items() if not key.startswith("_")}
        return repr((tensors, own, self.passing, self.absent))


KINDS = [
    *("number", "word", "switch", "none", "new", "removed", "list", "inner list", "dict", "set", "deque", "counter"),
    *("tensor", "tensor in place", "tensor in a list", "buffer", "buffer in place", "passing buffer in place"),
    *("absent buffer", "norm", "tensor made and then in place", "tensor now and then in place"),
]
REFUSED_LATE = {"tensor in place", "passing buffer in place", "tensor now and then in place"}


def trained(kinds, firsts, orders, recompute):
    """Returns losses, gradients and states after a batch of each order."""
    layers = [Keeping(kind, first) for kind, first in zip(kinds, firsts)]
    executor = one_rank([[layer] for layer in layers], recompute)
    losses = []
    for number, order in enumerate(orders):
        losses += run(executor, [torch.linspace(-1, 1, 3) + number + index for index in range(3)], order)
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
    late = any(kind in REFUSED_LATE and (first > 1 or "now and then" in kind) for kind, first in zip(kinds, firsts))
    try:
        assert trained(kinds, firsts, orders, recompute=True) == expected
    except RuntimeError as error:
        assert late and "was changed in place after a forward had left it alone" in str(error)
