"""What Megatron-core's layers need on a CPU under DeepSpeed, which must not see a GPU as with testing.cpu_shim."""

import contextlib

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker


def start_megatron(tensor_ranks: int = 1) -> None:
    """Megatron-core's process groups. Its sequence parallelism and its own attention make tensors on the current CUDA
    device, and attention draws from a CUDA generator."""
    torch.cuda.current_device = lambda: "cpu"
    get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_ranks, create_gloo_process_groups=False)
