"""Which layers form a chunk, and which pipeline rank a chunk lives on."""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import accumulate
from math import inf

Placement = tuple[int, ...]
"""The pipeline rank of every chunk."""

PLACEMENTS = ("modular", "contiguous")


def place_chunks(kind: str, chunks: int, pipeline_ranks: int) -> Placement:
    """Places ``chunks`` on ``pipeline_ranks``.

    modular: chunk c on rank c mod P (Lamy-Poirier, arXiv 2106.02679). contiguous: equal runs of neighbouring chunks;
    the first ranks take one more where C mod P is not 0.
    """
    if pipeline_ranks < 1:
        raise ValueError(f"pipeline_ranks is {pipeline_ranks}; it must be at least 1")
    if chunks < pipeline_ranks:
        raise ValueError(
            f"{chunks} chunks cannot occupy {pipeline_ranks} pipeline ranks; "
            f"use at most {chunks} pipeline ranks or more chunks"
        )
    if kind == "modular":
        return tuple(chunk % pipeline_ranks for chunk in range(chunks))
    if kind == "contiguous":
        bounds = split_evenly(chunks, pipeline_ranks)
        return tuple(bisect_right(bounds, chunk) - 1 for chunk in range(chunks))
    raise ValueError(f"placement is '{kind}'; it must be one of {', '.join(PLACEMENTS)}")


def split_evenly(items: int, parts: int) -> list[int]:
    """``parts + 1`` bounds that cut ``items`` into parts whose sizes differ by at most one, larger ones first."""
    size, larger = divmod(items, parts)
    return [part * size + min(part, larger) for part in range(parts + 1)]


def split_by_count(layers: int, layers_per_chunk: int) -> list[int]:
    """Chunk bounds that cut the layer list every ``layers_per_chunk`` entries; the last chunk may be shorter."""
    if layers_per_chunk < 1:
        raise ValueError(f"layers_per_chunk is {layers_per_chunk}; it must be at least 1")
    return [*range(0, layers, layers_per_chunk), layers]


def split_balanced(weights: Sequence[float], parts: int) -> list[int]:
    """Chunk bounds of the contiguous split whose heaviest part is as light as possible, no part empty; of those the one
    with the least sum of squared weights, so that the rest is even too."""
    layers = len(weights)
    if not 1 <= parts <= layers:
        raise ValueError(f"{layers} layers cannot be cut into {parts} chunks; use 1 to {layers} chunks")
    prefix = [0.0, *accumulate(weights)]
    limit = _lightest_heaviest_part(prefix, parts)
    # cost[end]: least sum of squares of the first ``end`` layers in the parts so far; starts[end]: begin of the last.
    cost = [0.0] + [inf] * layers
    cuts: list[list[int]] = []
    for part in range(parts):
        extended, starts = [inf] * (layers + 1), [0] * (layers + 1)
        for end in range(part + 1, layers + 1):
            for start in range(end - 1, part - 1, -1):
                weight = prefix[end] - prefix[start]
                if weight > limit:
                    break
                if cost[start] + weight**2 < extended[end]:
                    extended[end], starts[end] = cost[start] + weight**2, start
        cost = extended
        cuts.append(starts)
    bounds = [layers]
    for starts in reversed(cuts):
        bounds.append(starts[bounds[-1]])
    return bounds[::-1]


def _lightest_heaviest_part(prefix: Sequence[float], parts: int) -> float:
    """Bisects the sums a part can have; a limit suffices if parts filled greedily do, one layer left for each."""
    layers = len(prefix) - 1

    def suffices(limit: float) -> bool:
        start = 0
        for part in range(parts):
            end = min(bisect_right(prefix, prefix[start] + limit) - 1, layers - (parts - part - 1))
            if end <= start:
                return False
            start = end
        return start == layers

    sums = sorted({prefix[end] - prefix[start] for start in range(layers) for end in range(start + 1, layers + 1)})
    return sums[bisect_left(sums, True, key=suffices)]


def split_automatic(layer_types: Sequence[Hashable]) -> list[int]:
    """Chunk bounds where every layer of the most frequent type starts a chunk.

    What comes before the first (embedding) joins the first chunk, what follows the last (norm, head) joins the last.
    Of equally frequent types the one that appears first counts.
    """
    if not layer_types:
        raise ValueError("the layer list is empty; a model needs at least one layer")
    frequent, _ = Counter(layer_types).most_common(1)[0]
    starts = [index for index, layer_type in enumerate(layer_types) if layer_type == frequent]
    return [0, *starts[1:], len(layer_types)]
