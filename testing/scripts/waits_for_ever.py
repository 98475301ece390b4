"""A DeepSpeed pipeline script. After the first step the last rank ends, and the others wait for it in C code that no
broken connection ends, as kernels of NCCL do."""

import ctypes
import os
import signal
import sys
import time

end = sys.argv[1]
if "--install" in sys.argv:
    import ds_lgamp

    ds_lgamp.install()

import deepspeed  # noqa: E402 as a user would, after install
import torch  # noqa: E402
from deepspeed.pipe import LayerSpec, PipelineModule  # noqa: E402
from torch import nn  # noqa: E402

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "ds_lgamp": {},
}


def main() -> None:
    deepspeed.init_distributed("gloo", verbose=False)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    layers = [LayerSpec(nn.Linear, 4, 4) for _ in range(ranks)]
    net = PipelineModule(layers, num_stages=ranks, loss_fn=nn.functional.mse_loss)
    engine, *_ = deepspeed.initialize(model=net, config=CONFIG)
    engine.train_batch(iter([(torch.ones(1, 4), torch.zeros(1, 4))] * 2))
    torch.distributed.barrier()
    if rank < ranks - 1 and end in ("return", "destroy"):
        # Longer than a rank waits before it ends because of another one.
        time.sleep(5)
    elif rank < ranks - 1:
        ctypes.CDLL(None).pause()
    elif end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif end == "raise":
        raise ArithmeticError("the script is in trouble")
    elif end == "destroy":
        torch.distributed.destroy_process_group()
        os._exit(0)


if __name__ == "__main__":
    main()
