"""Which optimizers update shards on the host of a GPU."""

from types import SimpleNamespace

import pytest
from deepspeed.ops.adam import FusedAdam
from deepspeed.ops.lion import FusedLion

from ds_lgamp.config import ConfigError, read_block
from ds_lgamp.integrations.deepspeed.config import zero
from ds_lgamp.integrations.deepspeed.config.zero import check_offloaded, live_folder, refuse_offloaded_optimizer

HOST = SimpleNamespace(zero_config=SimpleNamespace(offload_optimizer=SimpleNamespace(device="cpu", ratio=1.0)))


@pytest.fixture
def beside_a_gpu(monkeypatch):
    monkeypatch.setattr(zero, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: "cuda"))


def config_of(name, **options):
    return SimpleNamespace(**vars(HOST), optimizer_name=name, optimizer_params={"lr": 0.01, **options})


def test_adam_without_bias_correction_needs_the_kernel_of_the_host(beside_a_gpu):
    with pytest.raises(ConfigError, match="bias_correction is False.*write optimizer.type DeepSpeedCPUAdam"):
        refuse_offloaded_optimizer(config_of("adam", bias_correction=False), None)


@pytest.mark.parametrize(
    "config", [config_of("adam"), config_of("DeepSpeedCPUAdam", bias_correction=False), config_of("lion")]
)
def test_adam_and_deepspeeds_optimizers_of_the_cpu_update_on_the_host(beside_a_gpu, config):
    refuse_offloaded_optimizer(config, None)


def test_chunks_that_stay_on_a_gpu_need_a_kernel_for_it(beside_a_gpu):
    partly = SimpleNamespace(offload_optimizer=SimpleNamespace(device="cpu", ratio=0.5))
    for name in ("DeepSpeedCPUAdam", "lion"):
        config = SimpleNamespace(**{**vars(config_of(name)), "zero_config": partly})
        with pytest.raises(ConfigError, match="ratio is 0.5, which leaves chunks on the device, but DeepSpeedCPU"):
            refuse_offloaded_optimizer(config, None)
    refuse_offloaded_optimizer(SimpleNamespace(**{**vars(config_of("adam")), "zero_config": partly}), None)


@pytest.mark.parametrize("kind", [FusedAdam, FusedLion])
def test_kernels_of_a_gpu_do_not_update_on_the_host(beside_a_gpu, kind):
    with pytest.raises(
        ConfigError, match=f"optimizer is {kind.__name__}, which takes shards on the device, but .*; use"
    ):
        check_offloaded(config_of("adam"), kind)


def test_without_a_gpu_the_kernel_of_the_device_is_that_of_the_host():
    refuse_offloaded_optimizer(config_of("adam", bias_correction=False), None)


def test_live_states_of_what_lies_on_a_disk_are_refused_by_key():
    kept = read_block({"ds_lgamp": {"live_checkpoint": "live"}})
    for key in ("offload_optimizer", "offload_param"):
        devices = {"offload_optimizer": "cpu", "offload_param": "cpu", key: "nvme"}
        sections = {name: SimpleNamespace(device=device) for name, device in devices.items()}
        with pytest.raises(
            ConfigError, match=f"live_checkpoint is 'live', but zero_optimization.{key}.device is 'nvme'"
        ):
            live_folder(SimpleNamespace(zero_config=SimpleNamespace(**sections)), kept)
