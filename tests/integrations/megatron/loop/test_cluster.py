"""``ds_lgamp run --cluster`` trains Megatron-LM's unedited pretrain_gpt.py with the losses of the launcher's order of
ranks."""

import json

import pytest

from testing.launching import torchrun_on_nodes
from testing.pretraining import PIPELINE, block_flag, losses_of, pretrain, scalars_of, start_in, words_of
from tests.planner.islands import island

CHUNKS = 2


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return start_in(tmp_path_factory.mktemp("start"))


@pytest.fixture(scope="module")
def launched(start, tmp_path_factory):
    """Trains P2 x W2 at stage 3 in the launcher's order."""
    block = block_flag("", tmp_path_factory.mktemp("launched"), 3, chunks_per_rank=CHUNKS)
    return pretrain(4, f"{start} {PIPELINE} {block}", "-m ds_lgamp run")


@pytest.mark.slow
@pytest.mark.parametrize(("speed", "layout"), [(1, "Ett|tt|tt|ttL"), (3, "Ettt|t|ttt|tL")])
def test_losses_do_not_depend_on_who_is_which_rank(start, launched, speed, layout, tmp_path):
    """The island of node 1 comes first in the file, and so has the first pipeline rank. If it is the faster one, it has
    more layers."""
    file, events = tmp_path / "islands.json", tmp_path / "events"
    islands = [island("east", ["b"], speed=speed), island("west", ["a"])]
    file.write_text(json.dumps({"islands": islands, "between": {"bandwidth": "100 Mbit/s", "latency": "1 ms"}}))
    block = block_flag("", tmp_path, 3, chunks_per_rank=CHUNKS)
    launcher = f"-m ds_lgamp run --cluster {file}"
    text = torchrun_on_nodes(words_of(f"{start} {PIPELINE} {block}", str(events), launcher), ["a", "b"])
    assert "data-parallel groups stay together on nodes" in text and "islands in the order east, west" in text
    assert layout in text
    placed = losses_of(scalars_of(str(events)))
    assert len(placed.training) == len(launched.training) > 0
    assert placed.training == pytest.approx(launched.training, rel=1e-6)
    assert placed.validation == pytest.approx(launched.validation, rel=1e-6)
