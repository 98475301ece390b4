"""With offload_activations, inputs of chunks wait on the host, and a step stays the same to the bit."""

import gc
import tempfile

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from benchmarks.contenders import Layout
from benchmarks.contenders.formula import program_of
from benchmarks.contenders.lgamp import Layered
from benchmarks.memory import ADAMW, activation_bytes
from benchmarks.model import ModelSize
from ds_lgamp.config import ConfigError, LgampConfig, read_block
from ds_lgamp.cost.memory import rank_memory
from ds_lgamp.cost.units import Sharding
from ds_lgamp.partition import bus
from ds_lgamp.partition.disk import Disk
from ds_lgamp.runtime import graph
from ds_lgamp.runtime.graph import StoredInputs
from ds_lgamp.runtime.measure import PeakMemory, live_tensors, storage_of
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.schedule.transfers import add_stored_inputs
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.engine.test_recompute import KEEPING, engine, gradients_and_peak_of, micro_batch

BLOCKS = {
    "none": {},
    "cpu": {"offload_activations": "cpu"},
    "nvme": {"offload_activations": "nvme", "nvme_path": tempfile.gettempdir()},
}


def keep_the_host_apart(patch):
    """Lets PeakMemory see no memory of the host that a step takes. Here both are main memory."""
    for owner, name in ((StoredInputs, "_home"), (graph, "_values"), (Disk, "empty"), (bus, "aligned")):
        patch.setattr(owner, name, unseen(getattr(owner, name)))


def unseen(stock):
    def made(*arguments):
        with _disable_current_modes():
            return stock(*arguments)

    return made


def run_engines(pipeline_ranks):
    """Returns gradients and peak memory by key."""
    prepare_rank()
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        keep_the_host_apart(patch)
        for name, block in BLOCKS.items():
            trained = engine(KEEPING, pipeline_ranks, **block)
            gradients_and_peak_of(trained)
            found[name] = gradients_and_peak_of(trained)
            del trained
            gc.collect()
    return found


@pytest.mark.parametrize("pipeline_ranks", [1, 2])
def test_gradients_are_equal_to_the_bit_and_the_device_holds_fewer_inputs(pipeline_ranks):
    one = micro_batch(0)[0].nbytes
    for found in run_on_ranks(pipeline_ranks, run_engines, pipeline_ranks):
        expected, peak_on_device = found["none"]
        for key in ("cpu", "nvme"):
            gradients, peak = found[key]
            assert gradients.keys() == expected.keys()
            for name, gradient in gradients.items():
                assert torch.equal(gradient, expected[name]), name
            assert peak_on_device - peak >= 2 * one, "of the inputs of several chunks and three micro-batches"


def on_device(trained):
    """Returns the tensors that are there between steps, but for those of the host, which steps use again."""
    stored = trained.engine.lgamp.executor._stored_inputs
    on_host = set() if stored is None else {storage_of(home)._cdata for free in stored._free.values() for home in free}
    return [tensor for tensor in live_tensors() if storage_of(tensor)._cdata not in on_host]


SIZE = ModelSize(blocks=5, width=64, sequence=128, samples=2)
MICRO_BATCHES = 6
SCALAR_BYTES = 500
"""Losses, step counters, the norm, and what is left of inputs that are away."""


def measure_peaks():
    """Returns the peak of a step on the device, by key, and the formula's."""
    prepare_rank()
    peaks = {}
    layout = Layout(1, 1, SIZE)
    with pytest.MonkeyPatch.context() as patch:
        keep_the_host_apart(patch)
        for key in ("none", "cpu"):
            trained = Layered(layout, zero_stage=2, resident_chunks=2, offload_activations=key)
            for step in range(2):
                gc.collect()
                with PeakMemory(on_device(trained)) as memory:
                    trained.step(step, MICRO_BATCHES)
            peaks[key] = memory.peak
            del trained
    actions, units = program_of(layout, 0, MICRO_BATCHES, 2, 2)
    storing = ProgramSpec((0,) * SIZE.blocks, "layered", MICRO_BATCHES, MICRO_BATCHES, 2, 2, stores_inputs=True)
    programs = {"none": actions, "cpu": add_stored_inputs(storing, 0, [actions])[0]}
    sharding = Sharding(2, 1, all_to_all=True)
    told = {
        key: rank_memory(program, units, sharding, ADAMW, activation_bytes(SIZE)) for key, program in programs.items()
    }
    return peaks, told


def test_the_formula_tells_the_peak_on_the_device():
    ((peaks, told),) = run_on_ranks(1, measure_peaks)
    for key in told:
        assert 0 <= peaks[key] - told[key].peak <= SCALAR_BYTES, key
    one = 4 * SIZE.width * SIZE.sequence * SIZE.samples
    assert told["none"].peak - told["cpu"].peak >= 10 * one, "of the inputs of three chunks and six micro-batches"
    # Chunks 1 to 3 have recomputed inputs. At the turn the host has them all.
    assert (told["none"].activations.on_host, told["cpu"].activations.on_host) == (0, 3 * MICRO_BATCHES * one)


def test_what_is_not_recomputed_has_no_inputs_to_store():
    with pytest.raises(ConfigError, match="recompute is 'none', but offload_activations stores"):
        read_block({"ds_lgamp": {"offload_activations": "cpu", "recompute": "none"}})
    assert LgampConfig(offload_activations="cpu").recompute == "full"
