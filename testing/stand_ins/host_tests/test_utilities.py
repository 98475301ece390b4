"""Stands for tests/unit_tests/test_utilities.py of Megatron-LM: one rank, with gloo in place of NCCL."""

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state


class Utils:
    @staticmethod
    def initialize_model_parallel(**sizes: Any) -> None:
        parallel_state.destroy_model_parallel()
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel(**sizes)

    @staticmethod
    def destroy_model_parallel() -> None:
        parallel_state.destroy_model_parallel()
