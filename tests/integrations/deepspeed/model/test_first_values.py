"""Tensors of any layout and type get the values of the first rank, and nothing beside them changes."""

import random

import torch
import torch.distributed as dist

from ds_lgamp.integrations.deepspeed.model import shared_tensors
from ds_lgamp.integrations.deepspeed.model.shared_tensors import share_values
from testing.ranks import run_on_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8, torch.complex64]
VIEWS = 100


def memory(seed: int) -> torch.Tensor:
    drawn = random.Random(seed)
    return torch.randint(2, (96,), generator=torch.Generator().manual_seed(seed)).to(drawn.choice(DTYPES))


def random_view(number: int, whole: torch.Tensor) -> torch.Tensor:
    """Returns a view of ``whole`` whose elements repeat only where it is expanded."""
    drawn = random.Random(number)
    view = whole.view(drawn.choice([(96,), (8, 12), (2, 4, 12), (4, 3, 2, 4)]))
    view = view.permute(drawn.sample(range(view.dim()), view.dim()))
    for dimension in range(view.dim()):
        start, step = drawn.randrange(2), drawn.choice([1, 1, 2, 3])
        view = view[(slice(None),) * dimension + (slice(start, None, step),)]
    if drawn.random() < 0.3:
        view = view.select(0, 0)
    if drawn.random() < 0.3:
        view = view.unsqueeze(0).expand(3, *view.shape)
    return view


def share() -> list[bool]:
    """Shares random views of memory that differs by rank. Returns whether each has become what it should."""
    shared_tensors._PIECE = 24
    right = []
    for number in range(VIEWS):
        # The type is that of the number; the values differ by rank.
        wanted, own = memory(number), memory(number).roll(dist.get_rank()).clone()
        view, before, beside = random_view(number, own), own.clone(), torch.ones(96, dtype=torch.bool)
        share_values([view], dist.group.WORLD, torch.device("cpu"))
        beside[random_view(number, torch.arange(96)).reshape(-1)] = False
        shared = torch.equal(view, random_view(number, wanted))
        right.append(shared and torch.equal(own[beside], before[beside]))
    sparse = torch.eye(3).mul(dist.get_rank() + 1).to_sparse()
    with torch.inference_mode():
        inferred = torch.full((2, 2), float(dist.get_rank())).t()
    share_values([sparse, inferred, inferred, torch.empty(0)], dist.group.WORLD, torch.device("cpu"))
    return [*right, torch.equal(sparse.to_dense(), torch.eye(3)), bool((inferred == 0).all())]


def test_every_view_becomes_that_of_the_first_rank_and_memory_beside_it_stays():
    for right in run_on_ranks(2, share):
        assert all(right), [number for number, each in enumerate(right) if not each]
