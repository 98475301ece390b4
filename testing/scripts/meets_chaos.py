"""A DeepSpeed job that testing.chaos disturbs. Its argument is a JSON file with the fields of ``testing.chaos.Job`` and
a folder. Every rank leaves a file with its process there; the rank that meets a fault leaves the file "fault"."""

import ctypes
import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

WIDTH, VOCABULARY = 8, 32
FOR_EVER = 1000.0


def dies_of(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(FOR_EVER)


def raises() -> None:
    raise ArithmeticError("chaos")


def holds_the_interpreter() -> None:
    ctypes.PyDLL(None).sleep(int(FOR_EVER))


def stops_for_a_while() -> None:
    child = os.fork()
    if child == 0:
        time.sleep(2)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
    os.waitpid(child, 0)


def fills_the_disk() -> None:
    """From now on this rank cannot make a file longer."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))


FAULTS: dict[str, Callable[[], None]] = {
    "exception": raises,
    "exit": lambda: os._exit(random.choice((0, 3))),
    "segfault": lambda: ctypes.string_at(0),
    "SIGKILL": lambda: dies_of(signal.SIGKILL),
    "SIGTERM": lambda: dies_of(signal.SIGTERM),
    "SIGSTOP": lambda: dies_of(signal.SIGSTOP),
    "interpreter held": holds_the_interpreter,
    "sleep": lambda: time.sleep(FOR_EVER),
    "pause": stops_for_a_while,
    "slow rank": lambda: time.sleep(1.5),
    "full disk": fills_the_disk,
}


class Trained:
    """The job of this rank.

    Args:
        told: the fields of the job.
    """

    def __init__(self, told: dict[str, Any]) -> None:
        self.told, self.rank, self.step, self.met = told, dist.get_rank(), 0, False

    def meet(self, place: str) -> None:
        """Meets the fault, if this is its rank, step and place. A slow rank is slow from then on."""
        told = self.told
        slow = told["fault"] == "slow rank" and self.met
        if (self.rank, place) != (told["rank"], told["place"]) or self.step < told["step"] or (self.met and not slow):
            return
        self.met = True
        if told["fault"] in FAULTS:
            (Path(told["folder"]) / "fault").write_text(str(time.time()))
            FAULTS[told["fault"]]()

    def batches(self) -> Iterator[Any]:
        """The same numbers on every rank, by step."""
        generator = torch.Generator()
        while True:
            self.meet("data")
            generator.manual_seed(self.step)
            if self.told["door"] == "transformers":
                yield torch.randint(VOCABULARY, (2, 8), generator=generator)
            else:
                yield torch.randn(2, WIDTH, generator=generator), torch.zeros(2, WIDTH)


def pipeline(trained: Trained, config: dict) -> Any:
    from deepspeed.pipe import LayerSpec, PipelineModule

    class Layer(nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            trained.meet("forward")
            return super().forward(hidden)

    net = PipelineModule(
        [LayerSpec(Layer, WIDTH, WIDTH) for _ in range(trained.told["layers"])],
        **{"num_stages": trained.told["pipeline_ranks"], "loss_fn": nn.functional.mse_loss, "seed_layers": True},
        **{"seed_fn": lambda value: torch.manual_seed(int(value)), "base_seed": 5},
    )
    engine, *_ = deepspeed.initialize(model=net, config=config)
    return engine


def plain(trained: Trained, config: dict) -> Any:
    class Layer(nn.Linear):
        def forward(self, pair):  # noqa: ANN001, ANN202
            trained.meet("forward")
            return super().forward(pair[0]), pair[1]

    class Loss(nn.Module):
        def forward(self, pair):  # noqa: ANN001, ANN202
            return nn.functional.mse_loss(*pair)

    torch.manual_seed(5)
    layers = [Layer(WIDTH, WIDTH) for _ in range(trained.told["layers"])]
    config["ds_lgamp"]["pipeline_ranks"] = trained.told["pipeline_ranks"]
    engine, *_ = deepspeed.initialize(model=nn.Sequential(*layers, Loss()), config=config)
    return engine


def transformers(trained: Trained, config: dict) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(5)
    sizes = {"n_layer": trained.told["layers"], "n_embd": 8, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": 8}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    for block in model.transformer.h:
        block.mlp.register_forward_pre_hook(lambda *_: trained.meet("forward"))
    config["ds_lgamp"]["pipeline_ranks"] = trained.told["pipeline_ranks"]
    engine, *_ = deepspeed.initialize(model=model, config=config)
    return engine


DOORS = {"pipeline": pipeline, "plain": plain, "transformers": transformers}


def train_step(trained: Trained, engine: Any, batches: Iterator[Any]) -> float:
    door = trained.told["door"]
    if door == "pipeline":
        return engine.train_batch(batches).item()
    losses = []
    for _ in range(trained.told["micro_batches"]):
        batch = next(batches)
        loss = engine(batch) if door == "plain" else engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss)
    return float(sum(float(loss.detach()) for loss in losses)) / len(losses)


def main() -> None:
    told = json.loads(Path(next(word for word in sys.argv[1:] if word.endswith(".json"))).read_text())
    folder = Path(told["folder"])
    deepspeed.init_distributed("gloo", verbose=False)
    trained = Trained(told)
    (folder / f"rank {trained.rank}").write_text(str(os.getpid()))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": told["micro_batches"],
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": told["zero_stage"]},
        "ds_lgamp": {"hang_timeout": told["hang_timeout"], "schedule": told["schedule"], "keep_last": 3},
    }
    engine = DOORS[told["door"]](trained, config)
    engine.load_checkpoint(folder / "checkpoints")
    batches = trained.batches()
    while engine.global_steps < told["steps"]:
        trained.step = engine.global_steps + 1
        trained.meet("between steps")
        loss = train_step(trained, engine, batches)
        if trained.rank == 0:
            with open(folder / "losses", "a") as losses:
                losses.write(json.dumps([trained.step, loss]) + "\n")
        if engine.global_steps % told["save_every"] == 0:
            trained.meet("save")
            engine.save_checkpoint(folder / "checkpoints")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
