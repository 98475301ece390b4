"""Containers among the arguments of a call are copied, tensors are not."""

from collections import OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

from ds_lgamp.integrations.split.call import run_uncompiled
from ds_lgamp.integrations.split.state import copied_containers

Pair = namedtuple("Pair", "first second")


@dataclass
class Open:
    first: Any


@dataclass(frozen=True, slots=True)
class Frozen:
    first: Any


class Words(list):
    """A list with an attribute."""

    language = "en"


WRAPS = {
    "a list": lambda held: [held],
    "a class of lists": lambda held: Words([held]),
    "a UserList": lambda held: UserList([held]),
    "a deque": lambda held: deque([held], maxlen=3),
    "a tuple": lambda held: (held,),
    "a named tuple": lambda held: Pair(held, 1),
    "a dictionary": lambda held: {"key": held},
    "an OrderedDict": lambda held: OrderedDict(key=held),
    "a defaultdict": lambda held: defaultdict(list, key=held),
    "a UserDict": lambda held: UserDict(key=held),
    "a dataclass": Open,
    "a frozen dataclass with slots": Frozen,
    "a namespace": lambda held: SimpleNamespace(key=held),
}


def members(value: Any) -> list[Any]:
    """What a container holds."""
    if isinstance(value, dict | UserDict):
        return list(value.values())
    if isinstance(value, SimpleNamespace):
        return list(vars(value).values())
    if isinstance(value, Open | Frozen):
        return [value.first]
    return list(value)


@given(st.lists(st.sampled_from([*WRAPS]), max_size=4))
def test_a_container_in_any_container_is_copied_with_its_class_and_tensors_are_shared(wraps: list[str]) -> None:
    tensor = torch.zeros(2)
    innermost = [tensor]
    value: Any = innermost
    for wrap in wraps:
        value = WRAPS[wrap](value)

    copied = copied_containers(value)

    own, other = value, copied
    for _ in wraps:
        assert type(other) is type(own)
        assert len(members(other)) == len(members(own))
        own, other = members(own)[0], members(other)[0]
        assert other is not own
    assert own is innermost and other[0] is tensor
    other.append("written by a forward")
    assert innermost == [tensor]


UNCHANGED = [torch.zeros(2), torch.Size([2]), "text", 3, None, (1, torch.ones(1)), Open, object()]


@pytest.mark.parametrize("value", UNCHANGED)
def test_what_no_forward_can_refill_is_shared(value: Any) -> None:
    assert copied_containers(value) is value


def test_a_container_that_is_given_twice_is_copied_once_and_may_hold_itself() -> None:
    shared: list[Any] = [1]
    shared.append(shared)
    first, second = copied_containers((shared, {"again": shared}))
    assert first is second["again"] is first[1]
    assert first is not shared


def test_a_class_of_dictionaries_keeps_its_attributes() -> None:
    default = copied_containers(defaultdict(list, a=[1]))
    default["b"].append(2)
    assert default == {"a": [1], "b": [2]}
    words = Words(["a"])
    words.language = "de"
    assert copied_containers(words).language == "de"


def test_a_batch_of_transformers_stays_one() -> None:
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"input_ids": torch.zeros(1, 2)})
    copied = copied_containers(batch)
    copied["embeddings"] = 1
    assert list(batch) == ["input_ids"] and copied.input_ids is batch["input_ids"]
    output = transformers.utils.ModelOutput(loss=[1])
    assert copied_containers(output).loss is not output.loss


class Writes(torch.nn.Module):
    def forward(self, features: dict[str, Any], names: list[str]) -> int:
        features["token_embeddings"] = features["tokens"] + 1
        names.clear()
        return len(tree_leaves(features))


def test_a_forward_that_writes_to_its_arguments_runs_twice_with_the_same() -> None:
    features, names = {"tokens": torch.zeros(1)}, ["a"]
    assert run_uncompiled(Writes(), features, names=names) == 2
    assert (list(features), names) == (["tokens"], ["a"])
