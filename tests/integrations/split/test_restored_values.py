"""A trial leaves tensors and arrays as they were, whatever their layout and wherever functions hold them."""

import weakref
from functools import partial
from inspect import Signature
from types import MappingProxyType

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ds_lgamp.integrations.split.state import untouched
from tests.integrations.split.own_models import WIDTH, Attention, Gpt
from tests.integrations.split.splitting import layers_of


class Slotted:
    """Hides a tensor in a private slot. Another one, of a name that a forward uses, has no value."""

    __slots__ = "__scale", "given"

    def __init__(self):
        self.__scale = torch.ones(2)

    def scale(self):
        return self.__scale


class Sub(Tensor):
    pass


def _in_default(scale, *, other):
    return scale, other


_in_default.__defaults__, _in_default.__kwdefaults__ = (torch.ones(2),), {"other": torch.ones(2)}


# As a decorator leaves it, which shows another function.
_in_default.__signature__ = Signature()


def _doubled(tensors):
    for each in tensors:
        each.mul_(2)


BY_PARTIAL, BY_REFERENCE, SLOTTED = partial(_doubled, [torch.ones(2)]), torch.ones(2), Slotted()
REFERENCE, READ_ONLY, ARRAY = weakref.ref(BY_REFERENCE), MappingProxyType({"scale": torch.ones(2)}), numpy.ones(2)
SUB, TRAINED = torch.ones(2).as_subclass(Sub), torch.ones(2, requires_grad=True)
with torch.inference_mode():
    INFERRED = torch.ones(2)


class Everywhere(nn.Module):
    """Doubles tensors where it finds them."""

    def __init__(self):
        super().__init__()
        self.sparse, self.rows = torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr()
        self.given, self.grown = torch.ones(2), torch.ones(2)
        self.table = torch.ones(1, 1).expand(10**6, 10**6)

    def forward(self):
        BY_PARTIAL()
        _doubled([REFERENCE(), SLOTTED.scale(), READ_ONLY["scale"], self.sparse, self.rows, *_in_default()])
        with torch.inference_mode():
            _doubled([INFERRED, SUB, TRAINED])
        ARRAY[...] *= 2
        self.given.data, self.grown = torch.zeros(3), self.grown.resize_(4)

    def values(self):
        found = {"partial": BY_PARTIAL.args[0][0], "reference": BY_REFERENCE, "slot": SLOTTED.scale()}
        found.update(zip(("default", "by keyword"), _in_default()), proxy=READ_ONLY["scale"], inferred=INFERRED)
        found.update(sub=SUB, trained=TRAINED, array=torch.from_numpy(ARRAY), given=self.given, grown=self.grown)
        return {**found, "sparse": self.sparse.to_dense().sum(0), "rows": self.rows.to_dense().sum(0)}


def test_tensors_are_given_back_wherever_they_are():
    model = Everywhere()
    with untouched(model):
        model()
        assert {name for name, value in model.values().items() if value.tolist() == [1.0, 1.0]} == set()
    assert {name: value.tolist() for name, value in model.values().items() if value.tolist() != [1.0, 1.0]} == {}


TABLE = torch.zeros(2)


class Reading(nn.Module):
    def forward(self):
        return TABLE.sum()


class Calls(TorchDispatchMode):
    """Notes the operations inside it."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, positional=(), named=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*positional, **(named or {}))


def test_what_nobody_changes_is_not_written_to():
    """It may lie in a file that is open for reading, where a write ends the process, or wait for a backward pass."""
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * TABLE).sum()
    with Calls() as calls, untouched(Reading()):
        pass
    assert "clone" in calls.names and "copy_" not in calls.names
    loss.backward()


def test_blocks_inside_each_other_share_their_copies_of_tensors():
    """Tables may be large."""
    with Calls() as calls, untouched(Reading()), untouched(Reading()):
        TABLE.fill_(1.0)
        with untouched(Reading()):
            TABLE.fill_(2.0)
        assert TABLE.tolist() == [1.0, 1.0]
    assert TABLE.tolist() == [0.0, 0.0] and calls.names.count("clone") == 2


class Strange:
    """Answers nothing that is asked of it."""

    __slots__ = ("own",)

    def __getattr__(self, name):
        raise RuntimeError(name)


class Parent:
    """Is gone when somebody asks for it."""


STRANGE, GONE = Strange(), weakref.proxy(Parent())


class Holding(nn.Module):
    def __init__(self):
        super().__init__()
        self.strange, self.parent = Strange(), weakref.proxy(parent := Parent())
        del parent

    def forward(self):
        return STRANGE, GONE


def test_objects_that_answer_nothing_are_left_alone():
    with untouched(Holding()):
        pass


FOUND: dict[int, Tensor] = {}


class Setting(Attention):
    """Puts what it makes into a global when it first needs it."""

    def __init__(self, number):
        super().__init__(causal=True)
        self.number = number

    def forward(self, hidden):
        return super().forward(hidden) * FOUND.setdefault(self.number, torch.full([WIDTH], 2.0))


@pytest.mark.parametrize("ranks", [1, 2])
def test_imagined_forwards_leave_no_imagined_tensors_in_globals(ranks):
    model = Gpt()
    model.blocks = nn.ModuleList(Setting(number) for number in range(3))
    layers_of(model, pipeline_ranks=ranks)
    assert FOUND == {}
