"""Both ways to compute a gradient norm give the norm. One of them does not depend on where the gradient is cut."""

import math
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist

from ds_lgamp.optimizers.norms import exact_norm, global_norm
from testing.ranks import run_on_ranks

CPU = torch.device("cpu")


def numbers(spread, count=200_000):
    """Makes fp32 numbers whose magnitudes cover ``spread`` powers of ten."""
    generator = torch.Generator().manual_seed(count)
    magnitudes = 10 ** (spread * (torch.rand(count, generator=generator) - 0.5))
    return torch.randn(count, generator=generator) * magnitudes


def cut(values, pieces, seed):
    generator = torch.Generator().manual_seed(seed)
    bounds = torch.randint(1, len(values), (pieces - 1,), generator=generator).unique().tolist()
    parts = [values[start:end] for start, end in zip([0, *bounds], [*bounds, len(values)])]
    return [parts[index] for index in torch.randperm(len(parts), generator=generator)]


@pytest.mark.parametrize("spread", [0, 4, 40])
def test_cuts_and_order_do_not_change_a_bit(spread):
    values = numbers(spread)
    whole = exact_norm([values], None, CPU)
    assert whole.dtype == torch.float64
    norms = {exact_norm(cut(values, pieces, pieces), None, CPU).item() for pieces in (1, 2, 7, 50)}
    assert norms == {whole.item()}
    right = sum(Fraction(value) ** 2 for value in values[:20_000].tolist())
    assert exact_norm([values[:20_000]], None, CPU).item() == pytest.approx(math.sqrt(right), rel=1e-9)


def test_plain_sums_of_squares_depend_on_cuts():
    """Shows that the exact way is needed."""
    cuts = [cut(numbers(4), pieces, pieces) for pieces in (1, 2, 7, 50)]
    assert len({sum(part.double().square().sum().item() for part in parts) for parts in cuts}) > 1


@pytest.mark.parametrize(
    ("values", "norm"),
    [
        ([], 0.0),
        ([0.0, -0.0], 0.0),
        ([3.0, -4.0], 5.0),
        ([3e38, 3e38], math.hypot(float(torch.tensor(3e38)), float(torch.tensor(3e38)))),
        ([1e-45], float(torch.tensor(1e-45))),
        ([1.0, float("nan")], math.nan),
        ([1.0, float("nan"), float("nan")], math.nan),
        ([1.0, float("inf")], math.nan),
    ],
)
def test_extreme_values_have_their_norm_and_infinite_ones_nan(values, norm):
    gradients = [torch.tensor(values)] if values else []
    assert exact_norm(gradients, None, CPU).item() == pytest.approx(norm, rel=1e-15, nan_ok=True)


def norms_on_a_rank():
    """Returns the norm of numbers that are spread unevenly over ranks, and the norms if one rank or the other has a
    NaN. The first rank has the greatest numbers."""
    rank, parts = dist.get_rank(), cut(numbers(6), 7, 1)
    mine = parts[:5] if rank == 0 else parts[5:]
    faulty = [[*mine, torch.tensor([math.nan if rank == where else 1.0])] for where in (0, 1)]
    return [exact_norm(gradients, dist.group.WORLD, CPU).item() for gradients in (mine, *faulty)]


def test_ranks_have_the_norm_of_one_and_a_nan_of_one_is_told_to_all():
    for norm, *faulty in run_on_ranks(2, norms_on_a_rank):
        assert norm == exact_norm([numbers(6)], None, CPU).item()
        assert all(map(math.isnan, faulty))


@pytest.mark.parametrize(
    ("count", "dtype"),
    [
        (1, torch.float32),
        (4095, torch.float32),
        (4097, torch.float32),
        (1 << 23, torch.float32),
        (70_000, torch.bfloat16),
    ],
)
def test_the_usual_norm_is_as_good_as_one_of_sums_in_fp64(count, dtype):
    values = numbers(4, count).to(dtype)
    parts = cut(values, 3, 1) if count > 3 else [values]
    assert global_norm(parts, None, CPU).item() == pytest.approx(values.double().norm().item(), rel=1e-6)


def test_the_usual_norm_of_nothing_is_zero_and_others_are_told():
    assert global_norm([], None, CPU).item() == 0.0
    assert math.isnan(global_norm([torch.tensor([1.0, math.nan])], None, CPU).item())
    assert global_norm([torch.tensor([1.0, math.inf])], None, CPU).item() == math.inf


def test_the_usual_norm_copies_no_gradient():
    values = numbers(4, 1 << 20)
    with torch.profiler.profile(profile_memory=True) as profile:
        global_norm([values], None, CPU)
    assert 0 < max(event.cpu_memory_usage for event in profile.events()) < values.nbytes / 100


def norms_beside_a_number():
    """Returns whether a number that travels with a norm changes it, the number's sum, and the messages of both ways."""
    rank, group, messages = dist.get_rank(), dist.group.WORLD, []
    gradients = [torch.full((3,), float(rank + 1))]
    stock = dist.all_reduce

    def counting(tensor, *arguments, **options):
        messages[-1] += 1
        return stock(tensor, *arguments, **options)

    dist.all_reduce = counting
    found = []
    for norm in (global_norm, exact_norm):
        number = torch.tensor(float(rank + 1), dtype=torch.float64)
        messages.append(0)
        alone = norm(gradients, group, CPU).item()
        messages.append(0)
        beside = norm(gradients, group, CPU, number).item()
        found.append((alone == beside, number.item()))
    dist.all_reduce = stock
    return found, messages


def test_a_number_is_summed_over_the_ranks_by_the_messages_of_the_norm():
    for found, messages in run_on_ranks(2, norms_beside_a_number):
        assert found == [(True, 3.0)] * 2
        assert messages == [1, 1, 2, 2]
