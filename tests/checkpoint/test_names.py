"""The names of buffers in a checkpoint."""

from ds_lgamp.checkpoint.names import Copy, first_copies, names_to_write

RANKS = [(0, 0, 0), (0, 0, 1), (1, 0, 0), (0, 1, 0), (0, 1, 1), (1, 1, 0)]
"""Pipeline, data-parallel and tensor-parallel ranks, in the order of their copies."""


def names(digests):
    """Returns what every rank writes of a buffer. The ranks without a digest do not have it."""
    copies = [{"mean": Copy(places, digests[places])} if places in digests else {} for places in RANKS]
    first = first_copies(copies)
    return {places: names_to_write(own, first).get("mean") for places, own in zip(RANKS, copies)}


def test_copies_that_are_equal_are_written_by_the_first_rank():
    written = names(dict.fromkeys(RANKS, "a"))
    assert written == {**dict.fromkeys(RANKS), (0, 0, 0): "buffers/0/mean"}


def test_every_copy_that_differs_from_the_first_is_written():
    digests = {(0, 0, 1): "a", (1, 0, 0): "b", (0, 1, 1): "c", (1, 1, 0): "a"}
    expected = {(0, 0, 1): "buffers/0/mean", (1, 0, 0): "buffers/0-1-0/mean", (0, 1, 1): "buffers/1-0-1/mean"}
    assert names(digests) == {**dict.fromkeys(RANKS), **expected}
