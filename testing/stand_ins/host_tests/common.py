"""Stands for tests/unit/common.py of DeepSpeed: a test runs in the process of pytest, which is the only rank."""

import os

import deepspeed
import deepspeed.comm as dist
import deepspeed.ops
import pytest

# It would be compiled first, for some minutes.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class DistributedTest:
    world_size: int

    @pytest.fixture(autouse=True)
    def process_group(self, tmp_path):
        assert self.world_size == 1
        os.environ |= {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "0",
        }
        deepspeed.init_distributed("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        yield
        dist.destroy_process_group()
