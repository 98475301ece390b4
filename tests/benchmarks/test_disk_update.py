"""Updates of state on a disk are timed beside as many bytes front to back."""

import os
from functools import partial

import torch

from benchmarks import disk_update
from benchmarks.record import OURS
from ds_lgamp.schedule.spec import DISK_BLOCK, PIECE
from testing.ranks import run_on_ranks


def test_every_way_has_its_rate_and_the_disks():
    record = disk_update.run(DISK_BLOCK, repetitions=2)
    found = {(row.contender, row.config["state"], row.metric): row.median for row in record.rows}
    for state in ("copies in fp32", "state in bf16, by chance"):
        for name in ("read alone", "written alone", "read and written"):
            assert found[disk_update.PLAIN, state, name] > 0
        assert found[OURS, state, "read and written"] > 0 and found[OURS, state, "share of the disk's rate"] > 0
    assert len(record.targets) == 1


def moved_on_rank(folder):
    """Returns the bytes per parameter that the second update of all chunks reads and writes, by way."""
    found = []
    for way in disk_update.WAYS:
        step = disk_update.updates_in(folder, way, DISK_BLOCK)
        step()
        again = step()
        parameters = disk_update.CHUNKS * DISK_BLOCK
        found.append((again.read / parameters, again.written / parameters))
    return found


def test_an_update_moves_the_bytes_that_the_documents_name(tmp_path):
    """It reads gradient, weight and moments, and writes all but the gradient. Copies are rounded to weights in bf16."""
    assert run_on_ranks(1, moved_on_rank, str(tmp_path)) == [[(4 * 4, 3 * 4 + 2), (4 * 2, 3 * 2)]]


def test_plain_files_move_as_many_bytes_as_they_are_asked_to(tmp_path, monkeypatch):
    size, moved = 5 * PIECE + DISK_BLOCK, []
    (tmp_path / "file").write_bytes(b"x" * size)
    plain = disk_update.Plain(tmp_path / "file")

    def counted(name, move, file, pieces, start):
        moved.append((name, start, len(pieces[0])))
        return move(file, pieces, start)

    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(os, name, partial(counted, name, getattr(os, name)))
    plain.move(size, 2 * PIECE)
    whole, last = [(at * PIECE, PIECE) for at in range(5)], size - 2 * PIECE
    assert sorted(each[1:] for each in moved if each[0] == "preadv") == [*whole, (5 * PIECE, DISK_BLOCK)]
    assert sorted(each[1:] for each in moved if each[0] == "pwritev") == [(last, PIECE), (last + PIECE, PIECE)]
    written = torch.full([2 * PIECE // 4], 1e-3).numpy().tobytes()
    assert (tmp_path / "file").read_bytes() == b"x" * last + written
