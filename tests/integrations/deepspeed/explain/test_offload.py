"""What ``--explain`` says of offloading. The numbers are those of the formulas in ``ds_lgamp/cost``."""

import json
from dataclasses import replace

import pytest

from ds_lgamp.config import LgampConfig
from ds_lgamp.cost.memory import rank_memory
from ds_lgamp.cost.offload import DiskUse, LiveUse
from ds_lgamp.cost.traffic import bus_bytes, predict_traffic
from ds_lgamp.cost.units import ElementBytes, Sharding, UnitSize
from ds_lgamp.integrations.deepspeed.explain.facts import Explanation, RankFacts
from ds_lgamp.integrations.deepspeed.explain.text import as_text
from ds_lgamp.schedule.program import build_rank_program
from ds_lgamp.schedule.spec import Offload, ProgramSpec

BF16 = ElementBytes(weights=2, gradients=2, optimizer=8, update=0)
UNITS = [UnitSize(10**9, 10**9, (chunk,)) for chunk in range(4)]


def explained(offload, element=BF16):
    """Returns what is said of four chunks of 10^9 parameters on two data-parallel ranks."""
    updates = "next_step" if offload else "step"
    spec = ProgramSpec((0,) * 4, "layered", 4, 4, 3, updates=updates, offload=offload)
    actions = build_rank_program(spec, 0)
    loaded, stored = (None, None) if offload is None else bus_bytes(actions, UNITS, offload, Sharding(3, 2), element)
    rank = RankFacts(
        pipeline_rank=0,
        chunks=[],
        tied=[],
        parameters=4 * 10**9,
        traffic=predict_traffic(actions, 3, range(4), []),
        tied_sums=0,
        collective_bytes_sent=0,
        update_collectives=0,
        update_bytes_sent=0,
        bytes_between_nodes=None,
        memory=rank_memory(actions, UNITS, Sharding(3, 2), element, offload=offload),
        bus_bytes_loaded=loaded,
        bus_bytes_stored=stored,
    )
    return Explanation(
        spec=spec,
        settings=LgampConfig(),
        data_ranks=2,
        tensor_ranks=1,
        micro_batch_shares=[4, 4],
        precision="bf16",
        optimizer="AdamW",
        layers=4,
        parameters=4 * 10**9,
        bubble=0.0,
        activations_unknown="there are no data",
        ranks=[rank],
    )


def lines(facts):
    return [" ".join(line.split()) for line in as_text(facts).splitlines()]


def test_host_memory_and_bytes_over_the_bus_are_told():
    """Parts of half a billion elements: 6 loads of 1 GB, 4 stores of 2 GB; 2, 4, 8 and 4 bytes on the host."""
    output = lines(explained(Offload(parameters=True)))
    assert any(line.endswith("each update in the next step, on the host, as parameters are") for line in output)
    assert any(line.endswith("collectives send from the host to the host") for line in output)
    assert any(line.endswith("6.00 GB 8.00 GB") or line.endswith("6 GB 8 GB") for line in output)
    table = output[output.index("Memory on the host, each rank") :]
    assert table[1] == "rank weights master weights optimizer state gradients update peak"
    assert table[2] == "0 4 GB 8 GB 16 GB 8 GB 0 B 36 GB"
    assert (
        "Over a bus of 31.5 GB/s in each direction (PCIe 4.0 x16), a step's loads take at least 0.19 s, its stores "
        "0.254 s, whatever the number of micro-batches." in output
    )
    in_groups = explained(Offload(parameters=True))
    in_groups = replace(in_groups, spec=replace(in_groups.spec, micro_batch_group=2))
    assert any(line.endswith("0.19 s, its stores 0.254 s.") for line in lines(in_groups))
    header = next(line for line in output if line.startswith("rank weights resident"))
    assert header.startswith("rank weights resident loaded master optimizer")


def test_chunks_that_go_forward_only_are_told():
    facts = explained(None)
    assert not any("forward only" in line for line in lines(facts))
    output = "4 layers in 4 chunks, of which the first 2 are frozen and go forward only, 4,000,000,000 parameters"
    assert output in lines(replace(facts, spec=replace(facts.spec, first_trained=2)))


def test_calls_that_return_outputs_are_told():
    facts = explained(Offload(parameters=True))
    output = lines(replace(facts, spec=replace(facts.spec, returns_outputs=True)))
    assert any(
        line.startswith("4 micro-batches forward call by call, 1 in each, and backward all toge") for line in output
    )
    assert any(line.endswith("its stores 0.254 s.") for line in output)


def test_what_lies_on_a_disk_is_told():
    facts = explained(Offload(parameters=True))
    disk = DiskUse(held=72 * 10**9, read=70 * 10**9, written=36 * 10**9, buffers=18 * 10**9)
    output = lines(replace(facts, ranks=[replace(facts.ranks[0], disk=disk)]))
    assert output[output.index("On the disk, each rank") :][1:3] == [
        "rank held read in a step written in a step buffers on the host",
        "0 72 GB 70 GB 36 GB 18 GB",
    ]
    assert "On the disk, each rank" not in lines(facts)


def test_what_live_states_take_is_told():
    facts = explained(None)
    held = [LiveUse(held=48 * 10**9, written=24 * 10**9), LiveUse(None, None)]
    output = [lines(replace(facts, ranks=[replace(facts.ranks[0], live=live)])) for live in held]
    titles = ["Live states, each rank", "rank held written in a step"]
    assert [each[each.index(titles[0]) :][:3] for each in output] == [
        [*titles, "0 48 GB 24 GB"],
        [*titles, "0 unknown unknown"],
    ]
    assert titles[0] not in lines(facts)


def test_in_memory_nothing_is_said_of_a_host():
    text = as_text(explained(None))
    assert "host" not in text and "bus" not in text and "loaded" not in text


def test_what_is_unknown_of_the_state_on_the_host_is_said():
    output = lines(explained(Offload(), ElementBytes(weights=2, optimizer=None, update=None)))
    assert "The optimizer's state is unknown and left out of the peak." in output
    assert "0 4 GB 8 GB unknown 8 GB unknown 20 GB" in output
    assert any(line.endswith("each update in the next step, on the host") for line in output)


@pytest.mark.parametrize("offload", [None, Offload(), Offload(parameters=True)])
def test_a_program_reads_the_same(offload):
    output = json.loads(json.dumps(explained(offload).as_data()))
    (rank,) = output["ranks"]
    assert output["offload"] == (
        None if offload is None else {"parameters": offload.parameters, "on_device": [], "alone": False}
    )
    if offload is None:
        assert rank["memory"]["host"] is None and rank["bus_bytes_loaded"] is None
    else:
        assert rank["memory"]["host"]["peak"] == 36 * 10**9
        loads = 6 if offload.parameters else 4
        assert (rank["bus_bytes_loaded"], rank["bus_bytes_stored"]) == (loads * 10**9, 8 * 10**9)
