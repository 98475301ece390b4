"""Prepares Megatron-core's layers for a CPU under DeepSpeed. testing.cpu_shim would make DeepSpeed see a GPU."""

import contextlib

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from testing.cpu_shim import Stream, run_streams_in_order, split_by_lists


def start_megatron(tensor_ranks: int = 1, expert_ranks: int = 1) -> None:
    """Starts Megatron-core's process groups.

    Megatron-core's sequence parallelism, routers and attention make tensors on the current CUDA device, attention draws
    from a CUDA generator, and what sends tokens to experts copies their numbers on a CUDA stream. All are redirected to
    the CPU.
    """
    if torch.cuda.Stream is not Stream:
        run_streams_in_order()
        split_by_lists()
    torch.cuda.current_device = lambda: "cpu"
    get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_ranks, expert_model_parallel_size=expert_ranks, create_gloo_process_groups=False
    )
