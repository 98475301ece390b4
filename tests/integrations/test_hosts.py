"""Parts of a host are replaced together and restored together."""

import sys
from contextlib import ExitStack
from types import ModuleType

import pytest

from ds_lgamp.integrations.hosts import replace_attribute, replace_everywhere, standing_in


def stock():
    """A function of the host."""


def ours():
    """Replaces the function."""


class Stock:
    """A class of the host."""

    shared = "stock"

    def __init__(self, size):
        self.size = size


def test_attributes_are_put_back_in_reverse_order():
    owner, undo = ModuleType("owner"), ExitStack()
    owner.name = "stock"
    replace_attribute(owner, "name", "first", undo)
    replace_attribute(owner, "name", "second", undo)
    assert owner.name == "second"
    undo.close()
    assert owner.name == "stock"


@pytest.fixture
def hosts(monkeypatch):
    """Returns modules by path: two of a host that have the function, one under another name, and one of another
    package."""
    modules = {path: ModuleType(path) for path in ("host.one", "host.two", "host.other_name", "hostess.one")}
    for path, module in modules.items():
        setattr(module, "alias" if path == "host.other_name" else "stock", stock)
        monkeypatch.setitem(sys.modules, path, module)
    monkeypatch.setitem(sys.modules, "host.absent", None)
    return modules


def test_a_function_is_replaced_wherever_its_host_imported_it(hosts):
    undo = ExitStack()
    replace_everywhere("host", stock, ours, undo)
    assert hosts["host.one"].stock is hosts["host.two"].stock is ours
    assert hosts["host.other_name"].alias is hosts["hostess.one"].stock is stock
    undo.close()
    assert hosts["host.one"].stock is hosts["host.two"].stock is stock


def test_a_function_of_the_same_name_is_left_alone(hosts):
    hosts["host.two"].stock = ours
    with ExitStack() as undo:
        replace_everywhere("host", stock, lambda: None, undo)
        assert hosts["host.two"].stock is ours


def test_instantiating_a_stand_in_calls_the_function():
    made = standing_in(Stock, lambda kind, size: (kind, size))(3)
    assert made == (Stock, 3)


def test_a_stand_in_is_the_class_it_stands_for_in_everything_else():
    stand_in = standing_in(Stock, lambda kind, size: kind(size))
    instance = stand_in(3)
    assert type(instance) is Stock and isinstance(instance, stand_in) and issubclass(Stock, stand_in)
    assert (stand_in.__name__, stand_in.__module__, stand_in.__doc__) == ("Stock", __name__, Stock.__doc__)
    stand_in.added = 1
    assert Stock.added == 1
    del stand_in.added
    assert not hasattr(Stock, "added")


def test_a_subclass_of_a_stand_in_is_an_ordinary_class():
    stand_in = standing_in(Stock, lambda kind, size: None)

    class Own(stand_in):
        """A user's class."""

    made = Own(3)
    assert type(made) is Own and made.size == 3
    Own.shared = "own"
    assert Stock.shared == "stock"
    assert not isinstance(Stock(1), Own)
