"""Rounding by chance is right on average, leaves what bf16 has as it is, and depends on no cut."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_lgamp.optimizers.rounding import Noise

NOISE = Noise(1 << 12, torch.device("cpu"))


def rounded(values, key="weight/1", place=0):
    values = values.clone()
    NOISE.round_(values, key, place)
    return values


@settings(max_examples=50, deadline=None)
@given(st.floats(2**-100, 2**100), st.sampled_from([-1.0, 1.0]))
def test_a_result_lies_beside_its_value_and_equals_it_on_average(size, sign):
    value = torch.tensor(sign * size, dtype=torch.float32)
    results = torch.cat([rounded(value.expand(1 << 12), f"weight/{update}") for update in range(16)])
    low = (value.view(torch.int32) & ~0xFFFF).view(torch.float32)
    step = ((low.view(torch.int32) + 0x10000).view(torch.float32) - low).item()
    assert {*results.tolist()} <= {low.item(), low.item() + step}
    assert torch.equal(results, results.bfloat16().float())
    # 65,536 results, whose mean has a standard deviation of at most a 512th of a step.
    assert (results.double().mean() - value.double()).item() / step == pytest.approx(0, abs=5 / 512)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.0, float("inf"), -float("inf"), 2**-130])
def test_what_bf16_has_stays(value):
    values = torch.full((64,), value)
    assert torch.equal(rounded(values).view(torch.int32), values.view(torch.int32))


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, -0x400000, -1])
def test_nan_stays_nan(bits):
    """Also a GPU's, which has all bits but the sign."""
    assert rounded(torch.full((64,), bits, dtype=torch.int32).view(torch.float32)).isnan().all()


def test_another_update_or_name_rounds_otherwise_and_a_cut_does_not():
    values = torch.rand(4000)
    whole = rounded(values)
    assert not torch.equal(whole, rounded(values, "weight/2")) and not torch.equal(whole, rounded(values, "bias/1"))
    parts = [rounded(values[start : start + 777], place=start) for start in range(0, 4000, 777)]
    assert torch.equal(torch.cat(parts), whole)


def test_many_small_updates_add_up():
    """Each is a 4,096th of the weight, which the nearest number of 8 bits loses."""
    weights, nearest = torch.ones(4096), torch.ones(4096)
    for update in range(1000):
        weights += 2**-12
        NOISE.round_(weights, f"weight/{update}", 0)
        nearest = (nearest + 2**-12).bfloat16().float()
    assert weights.mean().item() == pytest.approx(1 + 1000 / 4096, rel=2e-3)
    assert (nearest == 1).all()
