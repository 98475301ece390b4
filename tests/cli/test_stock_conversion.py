"""A run loads what ``ds_lgamp checkpoint`` exports and imports."""

import shutil
import time

import pytest
import safetensors.torch
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from ds_lgamp.checkpoint.files import CheckpointError
from ds_lgamp.checkpoint.storage import ChecksummedWriter
from ds_lgamp.checkpoint.whole import verify
from ds_lgamp.cli.main import main
from testing.checkpoints import forge_state
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.linear import batches, build, engine_of, whole_state


def engine_with(block, stage):
    specs = [
        TiedLayerSpec("ends", nn.Linear, 6, 6),
        LayerSpec(nn.BatchNorm1d, 6),
        LayerSpec(nn.Linear, 6, 6),
        TiedLayerSpec("ends", nn.Linear, 6, 6),
    ]
    module = build(specs)
    return engine_of(module, block, stage, optimizer=torch.optim.Adam(module.parameters(), lr=0.05))


def save(folder):
    """Trains 2 steps and ends while the checkpoint is being saved. Returns its weights and buffers."""
    prepare_rank()
    write = ChecksummedWriter.write_data

    def write_late(*arguments):
        time.sleep(1)
        return write(*arguments)

    ChecksummedWriter.write_data = write_late
    engine = engine_with({"layers_per_chunk": 1}, 1)
    for step in range(2):
        engine.train_batch(batches(2, start=step))
    engine.save_checkpoint(folder)
    return whole_state(engine.module)


def load(folder, tags):
    """Loads each of ``tags`` at another layout.

    Returns the weights and buffers after each load, the error of a full load, and the number of steps after a run that
    continues from a forged state.
    """
    prepare_rank()
    engine = engine_with({"layers_per_chunk": 2}, 3)
    engine.train_batch(batches(2, start=5))
    with pytest.raises(CheckpointError) as error:
        engine.load_checkpoint(folder, tag=tags[0])
    loaded = []
    for tag in tags:
        engine.load_checkpoint(folder, tag=tag, load_module_only=True)
        assert engine.global_steps == 1
        loaded.append(whole_state(engine.module))
    engine.load_checkpoint(folder, tag="forged")
    engine.train_batch(batches(2))
    return loaded, str(error.value), engine.global_steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def saved(folder):
    weights = run_on_ranks(2, save, str(folder))[0]
    for dtype in ("fp32", "bf16"):
        exported = str(folder / "exported" / dtype)
        assert main(["checkpoint", "export", str(folder), exported, "--dtype", dtype]) == 0
        assert main(["checkpoint", "import", exported, str(folder / f"from {dtype}")]) == 0
    shutil.copytree(folder / "global_step2", folder / "forged")
    forge_state(folder / "forged", lambda state: state["counters"].update(module=0, train_batch=1))
    return weights


@pytest.fixture(scope="module")
def loaded(saved, folder):
    return run_on_ranks(4, load, str(folder), ["from fp32", "from bf16"])


def test_a_run_that_ends_with_destroy_process_group_is_saved(saved, folder):
    verify(folder / "global_step2")


def test_exported_weights_are_those_of_the_run(saved, folder):
    """Uses the names of the module. Tied weights appear once."""
    exported = safetensors.torch.load_file(folder / "exported" / "fp32" / "model.safetensors")
    assert sorted(exported) == sorted(
        [
            *(f"tied_modules.ends.{name}" for name in ("weight", "bias")),
            *(f"1.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")),
            *(f"2.{name}" for name in ("weight", "bias")),
        ]
    )
    assert (folder / "latest").read_text() == "from bf16"
    assert torch.equal(exported["1.running_mean"], saved["1.running_mean"])


def test_imported_weights_start_a_run_at_another_layout(saved, loaded, folder):
    for (exact, rounded), said, _ in loaded:
        assert said == f"{folder / 'from fp32'} has weights only; pass load_module_only=True"
        for name, tensor in saved.items():
            assert torch.equal(exact[name], tensor), name
            is_buffer = name.startswith("1.running") or not tensor.is_floating_point()
            assert torch.equal(rounded[name], tensor if is_buffer else tensor.bfloat16().float()), name


def test_a_checkpoint_sets_no_attributes_of_its_choice(loaded):
    assert [steps for _, _, steps in loaded] == [3] * 4
