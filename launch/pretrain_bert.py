"""Pretrains BERT with DeepSpeed on masked tokens and next sentences, in phases of growing sequence length.

    torchrun --standalone --nproc_per_node 4 launch/pretrain_bert.py --deepspeed_config example_configs/bert.json \\
        --data data/pydoc.bert --sequence-lengths 128 512 --steps 900 100 --save runs/bert

Flags describe model, phases and schedule of the learning rate; one that takes several values takes one for all phases,
or one per phase. The JSON file tells DeepSpeed how to run them: precision, optimizer, ZeRO stage, clipping. Write the
data with ``prepare_data.py --bert`` first. Ends with a model that ``from_pretrained`` reads, in the folder of --save.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from bert_data import PADDING, TRAINING, VALIDATION, Masking, PreparedData, micro_batches, rows_of, samples_of_rank
from bert_packing import packed_rows, rows_of_rank
from deepspeed.accelerator import get_accelerator
from packed_bert import PackedBert
from transformers import BertConfig, BertForPreTraining, PreTrainedTokenizerFast

MODEL = "model"
"""The folder of the trained model, inside that of checkpoints."""


class Phase(NamedTuple):
    """A part of the training with one sequence length."""

    number: int
    length: int
    steps: int
    batch: int
    micro_batch: int
    rate: float
    warmup: float
    """The share of the steps in which the learning rate rises."""
    packed: int | None
    """The longest pairs, in tokens, that share rows; None if a row is a pair and padding."""

    @property
    def kind(self) -> str:
        """The kind of its shards."""
        return str(self.length if self.packed is None else self.packed)

    @property
    def tag(self) -> str:
        """The beginning of the names of its checkpoints; the step follows."""
        return f"phase{self.number}-step"

    def accumulation(self, ranks: int) -> int:
        """Returns micro-batches of a rank per step. Raises SystemExit if the batch cannot be cut so."""
        steps, rest = divmod(self.batch, self.micro_batch * ranks)
        if rest or not steps:
            raise SystemExit(
                f"--batch-size is {self.batch}, which is no multiple of --micro-batch-size {self.micro_batch} times "
                f"{ranks} ranks; use a multiple of {self.micro_batch * ranks}"
            )
        return steps


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_argument_group("model")
    model.add_argument("--num-layers", type=int, default=4)
    model.add_argument("--hidden-size", type=int, default=128)
    model.add_argument("--num-attention-heads", type=int, default=4)
    model.add_argument("--max-position-embeddings", type=int, default=512)
    model.add_argument("--dropout", type=float, default=0.1, help="of hidden states and attention")
    phases = parser.add_argument_group("phases, with one value for all or one per phase")
    phases.add_argument("--sequence-lengths", type=int, nargs="+", default=[128, 512], help="tokens of a row")
    phases.add_argument("--steps", type=int, nargs="+", default=[900, 100], help="steps of the optimizer")
    phases.add_argument("--batch-size", type=int, nargs="+", default=[64], help="rows of a step, over all ranks")
    phases.add_argument(
        "--micro-batch-size", type=int, nargs="+", default=[8], help="rows that a rank computes at once"
    )
    phases.add_argument(
        "--pack",
        type=int,
        nargs="*",
        metavar="TOKENS",
        help="fill rows with several pairs instead of padding; pairs are those prepared for so many tokens (default: "
        "for the sequence length)",
    )
    phases.add_argument("--lr", type=float, nargs="+", default=[1e-3], help="highest learning rate")
    phases.add_argument("--lr-warmup-fraction", type=float, nargs="+", default=[0.1], help="share of steps to reach it")
    training = parser.add_argument_group("training")
    training.add_argument("--lr-decay-power", type=float, default=1.0, help="of the polynomial that it falls to 0 by")
    training.add_argument("--weight-decay", type=float, default=0.01, help="not of biases and norms")
    training.add_argument("--seed", type=int, default=1234)
    output = parser.add_argument_group("data and output")
    output.add_argument("--data", required=True, help="folder that prepare_data.py --bert wrote")
    output.add_argument("--save", help="folder for checkpoints and the trained model; a run goes on with those it has")
    output.add_argument("--save-interval", type=int, help="steps between checkpoints (default: one after each phase)")
    output.add_argument("--log-interval", type=int, default=10, help="steps between losses in the log")
    output.add_argument("--eval-interval", type=int, default=100, help="steps between evaluations on held-out text")
    output.add_argument("--eval-iters", type=int, default=8, help="micro-batches of a rank in an evaluation")
    output.add_argument(
        "--exit-interval", type=int, help="end after a step that this number divides, with a checkpoint"
    )
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)), help="set by launchers")
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    if args.deepspeed_config is None:
        parser.error("--deepspeed_config is required")
    return args


def phases_of(args: argparse.Namespace) -> list[Phase]:
    """Returns the phases. Raises SystemExit if a flag has another number of values than 1 or that of phases, or if a
    sequence is too long for the model or too short for a pair."""
    number = len(args.sequence_lengths)
    columns = []
    for flag in ("sequence_lengths", "steps", "batch_size", "micro_batch_size", "lr", "lr_warmup_fraction", "pack"):
        # Without values, --pack takes the pairs of each sequence length.
        values = args.sequence_lengths if flag == "pack" and args.pack == [] else getattr(args, flag) or [None]
        if len(values) not in (1, number):
            name = flag.replace("_", "-")
            raise SystemExit(f"--{name} has {len(values)} values for {number} sequence lengths; use 1 or {number}")
        columns.append(values * number if len(values) == 1 else values)
    if max(args.sequence_lengths) > args.max_position_embeddings:
        raise SystemExit(f"--sequence-lengths has {max(args.sequence_lengths)}; raise --max-position-embeddings to it")
    phases = [Phase(order, *values) for order, values in enumerate(zip(*columns), 1)]
    for phase in phases:
        if phase.packed is not None and phase.packed > phase.length:
            raise SystemExit(
                f"--pack has pairs of {phase.packed} tokens for --sequence-lengths {phase.length}, whose rows cannot "
                f"hold them; use pairs of at most {phase.length} tokens"
            )
    return phases


def build_model(args: argparse.Namespace, data: PreparedData) -> BertForPreTraining:
    torch.manual_seed(args.seed)
    config = BertConfig(
        # Tensor cores want multiples of 8.
        vocab_size=-(-data.tokenizer.get_vocab_size() // 8) * 8,
        hidden_size=args.hidden_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.num_attention_heads,
        intermediate_size=4 * args.hidden_size,
        max_position_embeddings=args.max_position_embeddings,
        hidden_dropout_prob=args.dropout,
        attention_probs_dropout_prob=args.dropout,
    )
    return BertForPreTraining(config) if args.pack is None else PackedBert(config)


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Returns the parameters with weight decay, which are the matrices, and those without."""
    parameters = list(model.parameters())
    matrices, vectors = ([p for p in parameters if (p.dim() > 1) is wanted] for wanted in (True, False))
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def rate_schedule(phase: Phase, power: float) -> Callable[[int], float]:
    """Returns the factor of the learning rate by step: a linear warm-up, then a polynomial decay to 0."""
    warmup = round(phase.warmup * phase.steps)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return max(0.0, 1 - (step - warmup) / max(1, phase.steps - warmup)) ** power

    return factor


def read_configuration(path: str) -> dict[str, Any]:
    """Returns the content of ds_config.json. Raises SystemExit if it names no optimizer."""
    config = json.loads(Path(path).read_text())
    if "optimizer" not in config:
        raise SystemExit(
            f'--deepspeed_config is {path}, which has no optimizer; write one, such as "optimizer": {{"type": "Lamb"}}'
        )
    config["optimizer"].setdefault("params", {})
    return config


def build_engine(args: argparse.Namespace, phase: Phase, data: PreparedData) -> Any:
    """Returns DeepSpeed's engine for a phase, with a new model."""
    config = read_configuration(args.deepspeed_config)
    config["train_micro_batch_size_per_gpu"] = phase.micro_batch
    config["gradient_accumulation_steps"] = phase.accumulation(dist.get_world_size())
    config["optimizer"]["params"]["lr"] = phase.rate
    model = build_model(args, data)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=parameter_groups(model, args.weight_decay),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, rate_schedule(phase, args.lr_decay_power)
        ),
        config=config,
    )
    return engine


def latest_tag(folder: str | None) -> str | None:
    """Returns the tag of the latest checkpoint, which the first rank looks up; None without any."""
    latest = Path(folder or "") / "latest"
    found = [latest.read_text().strip() if folder and dist.get_rank() == 0 and latest.is_file() else None]
    dist.broadcast_object_list(found)
    return found[0]


def number_of(tag: str | None) -> int:
    """Returns the number of the phase of a checkpoint; 1 without any."""
    return int(tag.removeprefix("phase").partition("-")[0]) if tag else 1


def resume(engine: Any, folder: str, tag: str, phase: Phase, data: PreparedData) -> int:
    """Loads a checkpoint. One of an earlier phase gives weights and moments, but no learning rate. Returns the steps of
    ``phase`` that it has.

    Raises SystemExit if it learned other tokens.
    """
    same = tag.startswith(phase.tag)
    _, state = engine.load_checkpoint(folder, tag=tag, load_lr_scheduler_states=same)
    if state["tokenizer"] != data.tokenizer_digest:
        raise SystemExit(
            f"--save is {folder}, whose checkpoint learned the tokens of another tokenizer than that of {data.folder}; "
            "name another folder, or the data that it learned from"
        )
    return state["step"] if same else 0


class Trainer:
    """Trains one phase."""

    def __init__(self, args: argparse.Namespace, phase: Phase, data: PreparedData) -> None:
        self.args, self.phase, self.data = args, phase, data
        self.engine = build_engine(args, phase, data)
        self.masking = Masking(data.tokenizer, args.seed)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.pairs = 0
        """Those that this rank has trained with since the last line of the log."""

    def batches(self, part: str, step: int = 0) -> Iterator[dict[str, torch.Tensor]]:
        """Yields this rank's micro-batches from the beginning of a step on."""
        seed, phase = self.args.seed, self.phase
        shards, place = self.data.shards(phase.kind, part), (self.rank, self.ranks, step * phase.batch)
        if phase.packed is not None:
            padding = self.data.tokenizer.token_to_id(PADDING)
            packs = rows_of_rank(shards, seed, phase.length, *place)
            rows = packed_rows(shards, self.masking, packs, phase.length, padding)
        else:
            rows = rows_of(shards, self.masking, samples_of_rank(shards.rows, seed, *place))
        return micro_batches(rows, phase.micro_batch)

    def train(self, done: int) -> bool:
        """Trains the steps after ``done``. Returns False if the training is to end before the phase does."""
        args, engine, phase = self.args, self.engine, self.phase
        batches, losses, begun = self.batches(TRAINING, done), [], time.monotonic()
        for step in range(done + 1, phase.steps + 1):
            losses.append(self.train_step(batches))
            if step % args.log_interval == 0 or step == phase.steps:
                mean = torch.stack(losses).mean()
                sums = torch.stack([mean, torch.full_like(mean, self.pairs)])
                dist.all_reduce(sums)
                loss, pairs = sums.tolist()
                rate, seconds = engine.get_lr()[0], time.monotonic() - begun
                self.say(
                    f"step {step} | loss {loss / self.ranks:.6f} | learning rate {rate:.3e} | "
                    f"{pairs / seconds:.1f} pairs per second"
                )
                losses, self.pairs, begun = [], 0, time.monotonic()
            if step % args.eval_interval == 0 or step == phase.steps:
                self.say(f"step {step} | {self.evaluate()}")
                begun = time.monotonic()
            ends = args.exit_interval is not None and step % args.exit_interval == 0
            if ends or step == phase.steps or (args.save_interval and step % args.save_interval == 0):
                self.save(step)
            if ends:
                return False
        return True

    def train_step(self, batches: Iterator[dict[str, torch.Tensor]]) -> torch.Tensor:
        """Trains one batch. Returns the mean loss of this rank's micro-batches."""
        accumulation = self.phase.accumulation(self.ranks)
        total = torch.zeros((), device=self.engine.device)
        for _ in range(accumulation):
            batch = next(batches)
            self.pairs += int((batch["next_sentence_label"] >= 0).sum())
            loss = self.engine(**self.on_device(batch)).loss
            self.engine.backward(loss)
            self.engine.step()
            total += loss.detach()
        return total / accumulation

    def on_device(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.to(self.engine.device) for name, tensor in batch.items()}

    @torch.no_grad()
    def evaluate(self) -> str:
        """Returns losses and accuracies of both tasks on held-out text, always with the same masks."""
        self.engine.eval()
        batches = self.batches(VALIDATION)
        sums = torch.zeros(6, device=self.engine.device, dtype=torch.float64)
        for _ in range(self.args.eval_iters):
            batch = self.on_device(next(batches))
            output = self.engine(**batch)
            tokens = task_sums(output.prediction_logits, batch["labels"])
            sums += torch.stack([*tokens, *task_sums(output.seq_relationship_logits, batch["next_sentence_label"])])
        self.engine.train()
        dist.all_reduce(sums)
        loss, right, tokens, pair_loss, pairs_right, pairs = sums.tolist()
        return (
            f"held out: masked tokens loss {loss / tokens:.4f}, accuracy {right / tokens:.4f} "
            f"(unigrams: loss {self.data.unigram_loss:.4f}); "
            f"next sentences loss {pair_loss / pairs:.4f}, accuracy {pairs_right / pairs:.4f}"
        )

    def save(self, step: int) -> None:
        """Writes a checkpoint, if there is a folder for it."""
        if self.args.save:
            state = {"step": step, "tokenizer": self.data.tokenizer_digest}
            self.engine.save_checkpoint(self.args.save, tag=f"{self.phase.tag}{step}", client_state=state)

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(f"sequence {self.phase.length} | {text}", flush=True)


def task_sums(logits: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    """Returns the sum of losses, the number of right predictions, and the number of labels.

    Args:
        logits: scores by class, [..., classes].
        labels: the classes, [...]; those that are negative do not count.
    """
    logits, labels = logits[labels >= 0].double(), labels[labels >= 0]
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    return [loss, (logits.argmax(-1) == labels).sum(), torch.tensor(len(labels), device=logits.device)]


def save_model(engine: Any, data: PreparedData, folder: Path) -> None:
    """Writes the model and its tokenizer for ``from_pretrained``. All ranks call it."""
    first = dist.get_rank() == 0
    engine.module.save_pretrained(folder, is_main_process=first)
    if first:
        # A model that packs has the parameters of transformers' own, which others are to read it as.
        config = BertConfig.from_pretrained(folder)
        config.architectures = [BertForPreTraining.__name__]
        config.save_pretrained(folder)
        PreTrainedTokenizerFast(
            tokenizer_object=data.tokenizer,
            **{"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]"},
            **{"sep_token": "[SEP]", "mask_token": "[MASK]"},
        ).save_pretrained(folder)


def main() -> None:
    args = parse_arguments()
    deepspeed.utils.logger.setLevel(logging.ERROR)
    data, phases = PreparedData(args.data), phases_of(args)
    read_configuration(args.deepspeed_config)
    get_accelerator().set_device(args.local_rank)
    deepspeed.init_distributed()
    for phase in phases:  # before days of training
        phase.accumulation(dist.get_world_size())
        data.shards(phase.kind, TRAINING)
    tag = latest_tag(args.save)
    for phase in phases[number_of(tag) - 1 :]:
        trainer = Trainer(args, phase, data)
        done = resume(trainer.engine, args.save, tag, phase, data) if tag else 0
        complete = trainer.train(done)
        if complete and phase is phases[-1] and args.save:
            save_model(trainer.engine, data, Path(args.save) / MODEL)
        trainer.engine.destroy()
        if not complete:
            break
        tag = f"{phase.tag}{phase.steps}"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
