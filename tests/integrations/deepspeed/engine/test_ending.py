"""All ranks end their engines in the same order, because what engines do at the end is collective."""

import random

import pytest

from ds_lgamp.integrations.user_script import finish_engines
from ds_lgamp.watch.this_rank import this_rank


class Engine:
    def __init__(self, number, ended):
        self.number, self.ended = number, ended

    def finish_gathers(self):
        self.ended.append(self.number)


@pytest.fixture(autouse=True)
def no_others(monkeypatch):
    monkeypatch.setattr(this_rank, "engines", type(this_rank.engines)())
    monkeypatch.setattr(this_rank, "agreements", {})


def test_engines_end_in_the_order_in_which_they_began():
    ended = []
    # The addresses of objects differ from rank to rank.
    engines = [Engine(number, ended) for number in range(50)]
    places = random.Random(0).sample(engines, len(engines))
    for number, engine in enumerate(places):
        engine.number = number
        this_rank.engines[engine] = None
    finish_engines()
    assert ended == list(range(50))


def test_an_engine_that_is_gone_is_not_waited_for():
    ended = []
    engines = [Engine(number, ended) for number in range(3)]
    for engine in engines:
        this_rank.engines[engine] = None
    del engine, engines[1]
    finish_engines()
    assert ended == [0, 2]


def test_ranks_agree_to_end_before_any_engine_does():
    ended = []
    engine = Engine("engine", ended)
    this_rank.engines[engine] = None
    this_rank.agreements[lambda: ended.append("agreed")] = None
    finish_engines()
    assert ended == ["agreed", "engine"]
