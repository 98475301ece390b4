"""With offloading, no copy between host and device is used before somebody has waited for it, on a GPU as on a CPU."""

import ast
import inspect
from contextlib import nullcontext
from functools import partial

import pytest

from ds_lgamp.partition import host
from ds_lgamp.runtime import graph
from testing.deepspeed_rank import prepare_rank
from testing.late_bus import late_copies
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.engine.test_offload import OFFLOADS, TYPICAL, train
from tests.runtime.test_nccl_rules import Wait, awaited, remove
from tests.slow import slow_except

CASES = [
    {**case, "grid": grid, "tied": True, "frozen": True}
    for grid in ((1, 1), (1, 2))
    for case in TYPICAL
    if "nvme" not in case["kept"][1] and case["precision"] != "fp16"
]
"""A disk is read and written in the foreground."""


def trained(case, late):
    prepare_rank()
    with late_copies() if late else nullcontext():
        return train(case, OFFLOADS[case["kept"][1]])


def is_as_ever(case, prepare=None):
    """Whether late copies change nothing. ``prepare`` is called on every rank with them."""
    ranks = case["grid"][0] * case["grid"][1]
    expected = run_on_ranks(ranks, trained, case, False)
    try:
        found = run_on_ranks(ranks, trained, case, True, before_init=prepare)
    except AssertionError:
        return False
    return all(own.numbers == others.numbers for own, others in zip(found, expected, strict=True))


@pytest.mark.parametrize("case", slow_except(CASES[:1], CASES), ids=str)
def test_late_copies_change_nothing(case):
    assert is_as_ever(case)


def waits():
    """Returns the places where the host or the program waits for a copy of a step."""
    return [
        Wait(module.__name__, node.lineno, ast.unparse(node))
        for module in (host, graph)
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Call) and awaited(node) is not None and ast.unparse(node) not in ELSEWHERE
    ]


ELSEWHERE = ("self._last.done()", "self._storing.wait()", "self.start(partial(_compute_with, self._threads)).wait()")
"""The first is for checkpoints. The others are not for values: whoever reads the gradient waits for its end, and a
number of threads changes none here."""


@pytest.mark.slow
@pytest.mark.parametrize("wait", waits(), ids=lambda wait: f"{wait.module}:{wait.line} {wait.text}")
def test_no_wait_is_dispensable(wait):
    assert not is_as_ever(CASES[0], partial(remove, wait))
