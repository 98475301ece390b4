"""Prepares a process that trains GPTs, and cleans up between two trainings."""

import gc
import os

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from megatron.core import parallel_state

from ds_lgamp.integrations.deepspeed.hook.initialize import compile_no_collective


def prepare_process(rank: int, device: int | None = None) -> None:
    """Sets what a launcher would set, before the process group exists.

    Args:
        rank: the rank, on a machine where all ranks are.
        device: index of the rank's device; None for the one with the rank's number.
    """
    index = rank if device is None else device
    # The loopback address may be the machine's only one.
    os.environ.update(LOCAL_RANK=str(index), GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
    get_accelerator().set_device(index)


def start_hosts() -> None:
    """Starts DeepSpeed and Megatron-core, on the process group that exists or else on a launcher's environment."""
    # Ranks begin with one thread, but the host's updates are for all cores.
    torch.set_num_threads(os.cpu_count() or 1)
    compile_no_collective()
    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.init_distributed(verbose=False)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)


def free_memory() -> None:
    """Frees what a training held. Engines are cycles of references."""
    gc.collect()
    get_accelerator().empty_cache()
