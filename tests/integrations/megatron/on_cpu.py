"""Prepares Megatron-core's layers for a CPU under DeepSpeed. testing.cpu_shim would make DeepSpeed see a GPU."""

import contextlib

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker


def start_megatron(tensor_ranks: int = 1) -> None:
    """Starts Megatron-core's process groups.

    Megatron-core's sequence parallelism and attention make tensors on the current CUDA device, and attention draws from
    a CUDA generator. Both are redirected to the CPU.
    """
    torch.cuda.current_device = lambda: "cpu"
    get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_ranks, create_gloo_process_groups=False)
