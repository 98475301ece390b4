"""How layers form chunks, and which pipeline rank owns each chunk."""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import accumulate
from math import inf

Placement = tuple[int, ...]
"""The pipeline rank of every chunk."""

PLACEMENTS = ("modular", "contiguous", "vee")


def place_chunks(kind: str, chunks: int, pipeline_ranks: int) -> Placement:
    """Places ``chunks`` on ``pipeline_ranks``.

    ``modular`` places chunk c on rank c mod P (Lamy-Poirier, arXiv 2106.02679). ``contiguous`` gives each rank a run of
    neighbouring chunks; the first ranks take one more if C mod P is not 0. ``vee`` places 2P chunks on the way from
    the first rank to the last one and back, so that the first rank owns both ends of the model (Qi et al., arXiv
    2405.15362).

    Raises ValueError if there are fewer chunks than ranks, or not two for each with ``vee``, or if ``kind`` is unknown.
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
    if kind == "vee":
        if chunks != 2 * pipeline_ranks:
            raise ValueError(
                f"placement is 'vee', which needs 2 chunks on each of {pipeline_ranks} pipeline ranks, but there are "
                f"{chunks} chunks; set chunks_per_rank to 2"
            )
        return (*range(pipeline_ranks), *reversed(range(pipeline_ranks)))
    raise ValueError(f"placement is '{kind}'; it must be one of {', '.join(PLACEMENTS)}")


def split_evenly(items: int, parts: int) -> list[int]:
    """Returns the ``parts + 1`` bounds of parts whose sizes differ by at most one. Larger parts come first."""
    size, larger = divmod(items, parts)
    return [part * size + min(part, larger) for part in range(parts + 1)]


def split_by_count(layers: int, layers_per_chunk: int) -> list[int]:
    """Returns chunk bounds with ``layers_per_chunk`` layers in each chunk. The last chunk may be shorter."""
    return [*range(0, layers, layers_per_chunk), layers]


def split_balanced(weights: Sequence[float], parts: int) -> list[int]:
    """Returns the chunk bounds for which the heaviest chunk is as light as possible. No chunk is empty.

    Among such splits it takes the one with the least sum of squared chunk weights, so the other chunks are even too.
    Raises ValueError if there are more chunks than layers.

    Args:
        weights: the weight of each layer.
        parts: the number of chunks.
    """
    layers = len(weights)
    if not 1 <= parts <= layers:
        raise ValueError(f"{layers} layers cannot be cut into {parts} chunks; use 1 to {layers} chunks")
    prefix = [0.0, *accumulate(weights)]
    limit = _lightest_heaviest_part(prefix, parts)
    # cost[end]: least sum of squares if the parts so far hold the first ``end`` layers; starts[end]: where the last of
    # these parts begins.
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
    """Returns the least weight that the heaviest part can have, by bisection over all possible sums.

    A limit suffices if greedily filled parts hold all layers. Each part leaves one layer for every later part.
    """
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
    """Returns chunk bounds where every layer of the most frequent type starts a chunk.

    Layers before the first of them (embedding) join the first chunk; layers after the last (norm, head) join the last
    chunk. Of equally frequent types, the first one in the model counts. Raises ValueError for an empty list.
    """
    if not layer_types:
        raise ValueError("the layer list is empty; a model needs at least one layer")
    frequent, _ = Counter(layer_types).most_common(1)[0]
    starts = [index for index, layer_type in enumerate(layer_types) if layer_type == frequent]
    return [0, *starts[1:], len(layer_types)]


def shares_by_speed(items: int, speeds: Sequence[float], least: int = 1) -> list[int]:
    """Returns how many of ``items`` equal pieces of work each worker takes, so that the last worker finishes as early
    as possible.

    Every item goes to the worker that would finish it first; among such workers to the one with the fewest items, then
    to the first. So no other shares have a smaller maximum of share / speed (D'Hondt's method), and equal speeds share
    evenly.

    Args:
        speeds: the relative speed of each worker, greater than 0. ``[6, 2]`` shares 8 items as 6 and 2, and 4 as 3 and
            1.
        least: what each worker takes at least; ``items`` are enough for that.
    """
    shares = [least] * len(speeds)
    for _ in range(items - least * len(speeds)):
        first = min(range(len(speeds)), key=lambda worker: ((shares[worker] + 1) / speeds[worker], shares[worker]))
        shares[first] += 1
    return shares


def split_by_speed(layers: int, placement: Placement, speeds: Sequence[float]) -> list[int]:
    """Returns chunk bounds with which ranks of different speeds finish together, as nearly as whole layers allow.

    A rank's layers follow its speed (:func:`shares_by_speed`). Its chunks share them evenly. So a fast rank has larger
    chunks, not more of them: a chunk of any rank takes about as long as any other, and no rank waits for a slow one.

    Args:
        layers: the number of equal layers, at least one for every chunk.
        speeds: the relative speed of each rank.
    """
    counts = Counter(placement)
    shares = shares_by_speed(layers, speeds, max(counts.values()))
    sizes = {rank: iter(_even_sizes(shares[rank], counts[rank])) for rank in counts}
    return [0, *accumulate(next(sizes[rank]) for rank in placement)]


def _even_sizes(items: int, parts: int) -> list[int]:
    """Returns the sizes of parts that differ by at most one. Larger ones are spread evenly."""
    bounds = [(2 * part * items + parts) // (2 * parts) for part in range(parts + 1)]
    return [end - start for start, end in zip(bounds, bounds[1:])]
