"""Parses Megatron-LM's flags for pretrain_gpt.py and translates them for Megatron-core and DeepSpeed."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import deepspeed
import torch
from megatron.core.activations import squared_relu
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.transformer import TransformerConfig


def parse_arguments(description: str | None, words: list[str] | None = None) -> argparse.Namespace:
    """Parses the flags in ``words``, or those of the command line. Exits with a message if flags are invalid or data is
    missing."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser.add_argument_group("model"))
    add_training_arguments(parser.add_argument_group("training"))
    add_data_arguments(parser.add_argument_group("data and output"))
    parser.add_argument(
        "--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)), help="local rank; set by the launcher"
    )
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args(words)
    refuse_combinations(parser, args)
    refuse_missing_data(args)
    return args


def refuse_combinations(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exits with a message if flags contradict each other."""
    if args.deepspeed_config is None:
        parser.error("--deepspeed_config is required")
    if args.sequence_parallel and (args.tensor_model_parallel_size == 1 or not torch.cuda.is_available()):
        parser.error("--sequence-parallel needs --tensor-model-parallel-size from 2, and GPUs; remove it")
    if args.num_query_groups is not None and not args.group_query_attention:
        parser.error("--num-query-groups needs --group-query-attention; add it")
    if args.kv_channels is None and args.hidden_size % args.num_attention_heads:
        parser.error(
            f"--hidden-size {args.hidden_size} is no multiple of --num-attention-heads {args.num_attention_heads}; "
            "change one of them, or give --kv-channels"
        )
    learned = args.position_embedding_type == "learned_absolute"
    if learned and args.max_position_embeddings is not None and args.max_position_embeddings < args.seq_length:
        parser.error(
            f"--max-position-embeddings {args.max_position_embeddings} is less than --seq-length {args.seq_length}; "
            "change one of them"
        )
    if args.swiglu and args.squared_relu:
        parser.error("--swiglu and --squared-relu are both given; keep one of them")
    if args.min_lr and args.lr_decay_style != "cosine":
        parser.error(f"--min-lr needs --lr-decay-style cosine, not {args.lr_decay_style}; remove it")
    if args.bf16 and args.fp16:
        parser.error("--bf16 and --fp16 are both given; keep one of them")
    if args.save_interval is not None and args.save is None:
        parser.error("--save-interval needs --save; name a folder")


def refuse_missing_data(args: argparse.Namespace) -> None:
    """Raises SystemExit if a file of the datasets or the tokenizer is missing."""
    prefixes = get_blend_from_list(args.data_path)[0]
    files = [args.tokenizer_model or f"{prefixes[0]}.tokenizer.json"]
    for file in files + [f"{prefix}{suffix}" for prefix in prefixes for suffix in (".bin", ".idx")]:
        if not Path(file).is_file():
            raise SystemExit(
                f"--data-path is {' '.join(args.data_path)}, but {file} is missing; write it with "
                f"launch/prepare_data.py --output-prefix {prefixes[0]}"
            )


def add_model_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--num-layers", type=int, default=8)
    group.add_argument("--hidden-size", type=int, default=128)
    group.add_argument(
        "--ffn-hidden-size",
        type=int,
        help="size inside the MLP (default: 4 times --hidden-size, 8/3 times with --swiglu)",
    )
    group.add_argument("--num-attention-heads", type=int, default=4)
    group.add_argument("--group-query-attention", action="store_true", help="let groups of heads share keys and values")
    group.add_argument("--num-query-groups", type=int, help="number of these groups (default: 1)")
    group.add_argument(
        "--kv-channels", type=int, help="size of a key or value head (default: --hidden-size / --num-attention-heads)"
    )
    group.add_argument("--seq-length", type=int, default=128)
    group.add_argument(
        "--max-position-embeddings", type=int, help="number of learned positions (default: --seq-length)"
    )
    group.add_argument("--position-embedding-type", choices=["rope", "learned_absolute"], default="learned_absolute")
    group.add_argument(
        "--make-vocab-size-divisible-by",
        type=int,
        default=128,
        help="pad the vocabulary so that every tensor-parallel rank has a multiple of this (default: 128)",
    )
    group.add_argument("--rotary-base", type=int, default=10000)
    group.add_argument("--rotary-percent", type=float, default=1.0)
    group.add_argument("--untie-embeddings-and-output-weights", action="store_true")
    group.add_argument("--normalization", choices=["LayerNorm", "RMSNorm"], default="LayerNorm")
    group.add_argument("--norm-epsilon", type=float, default=1e-5)
    group.add_argument("--qk-layernorm", action="store_true", help="normalise queries and keys of each head")
    group.add_argument("--swiglu", action="store_true", help="gated MLP layers; not with tensor parallelism")
    group.add_argument("--squared-relu", action="store_true")
    group.add_argument("--disable-bias-linear", action="store_true")
    group.add_argument("--init-method-std", type=float, default=0.02)
    group.add_argument("--hidden-dropout", type=float, default=0.1)
    group.add_argument("--attention-dropout", type=float, default=0.1)
    implementations = ["local", "transformer_engine"]
    group.add_argument(
        "--transformer-impl",
        choices=implementations,
        default="local",
        help="layers of PyTorch or of NVIDIA's Transformer Engine (default: local)",
    )


def add_training_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    group.add_argument("--tensor-model-parallel-size", type=int, default=1)
    group.add_argument(
        "--sequence-parallel", action="store_true", help="split the sequence between layers over tensor-parallel ranks"
    )
    group.add_argument("--micro-batch-size", type=int, default=2)
    group.add_argument("--global-batch-size", type=int, default=32)
    group.add_argument("--train-iters", type=int, default=150)
    group.add_argument(
        "--exit-interval", type=int, help="stop after the first iteration that is a multiple of this (default: never)"
    )
    group.add_argument("--lr", type=float, default=1e-3)
    group.add_argument(
        "--min-lr", type=float, default=0.0, help="learning rate at the end of a cosine decay (default: 0)"
    )
    group.add_argument("--lr-decay-style", choices=["constant", "linear", "cosine"], default="constant")
    group.add_argument("--lr-decay-iters", type=int, help="last iteration of the decay (default: --train-iters)")
    group.add_argument("--lr-warmup-iters", type=int, default=5)
    group.add_argument("--weight-decay", type=float, default=0.01, help="not of biases and norms")
    group.add_argument("--adam-beta1", type=float, default=0.9)
    group.add_argument("--adam-beta2", type=float, default=0.999)
    group.add_argument("--adam-eps", type=float, default=1e-8)
    group.add_argument("--clip-grad", type=float, default=1.0)
    group.add_argument("--bf16", action="store_true")
    group.add_argument("--fp16", action="store_true")
    group.add_argument("--seed", type=int, default=1234)


def add_data_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--data-path", nargs="+", default=["data/pydoc"], help="datasets as [WEIGHT] PREFIX ... (default: data/pydoc)"
    )
    group.add_argument(
        "--tokenizer-model", help="file of the tokenizer (default: PREFIX.tokenizer.json of the first dataset)"
    )
    group.add_argument(
        "--split", default="95,5,0", help="percentages of documents for training, validation and test (default: 95,5,0)"
    )
    group.add_argument(
        "--reset-attention-mask", action="store_true", help="let tokens attend only within their document"
    )
    group.add_argument("--reset-position-ids", action="store_true", help="restart learned positions at each document")
    group.add_argument("--eod-mask-loss", action="store_true", help="leave the ends of documents out of the loss")
    group.add_argument("--eval-interval", type=int, default=50, help="0 leaves evaluation out (default: 50)")
    group.add_argument("--eval-iters", type=int, default=2)
    group.add_argument("--log-interval", type=int, default=1, help="0 prints no training losses (default: 1)")
    group.add_argument("--loss-plot", help="image file for a plot of the losses (default: none)")
    group.add_argument("--save", help="folder for a checkpoint of the last iteration (default: none)")
    group.add_argument(
        "--save-interval", type=int, help="also write a checkpoint every so many iterations (default: never)"
    )
    group.add_argument(
        "--load",
        help="folder whose last checkpoint the run resumes; it may be empty if --save names it too (default: none)",
    )


def padded_vocabulary(words: int, args: argparse.Namespace) -> int:
    """The next size of a vocabulary of ``words`` that the tensor-parallel ranks can share, as Megatron-LM pads it."""
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return -(-words // multiple) * multiple


def transformer_config(args: argparse.Namespace) -> TransformerConfig:
    """Makes the configuration of the transformer layers."""
    ffn_hidden_size, activation = args.ffn_hidden_size, {}
    if args.swiglu:
        activation = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
        # Like Megatron-LM: two matrices replace one, with about as many weights. The size is a multiple of 64.
        ffn_hidden_size = ffn_hidden_size or int(args.hidden_size * 8 / 3 / 64) * 64
    elif args.squared_relu:
        activation = {"activation_func": squared_relu}
    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=(args.num_query_groups or 1) if args.group_query_attention else None,
        kv_channels=args.kv_channels,
        normalization=args.normalization,
        layernorm_epsilon=args.norm_epsilon,
        qk_layernorm=args.qk_layernorm,
        add_bias_linear=not args.disable_bias_linear,
        init_method_std=args.init_method_std,
        hidden_dropout=args.hidden_dropout,
        attention_dropout=args.attention_dropout,
        use_cpu_initialization=True,  # same weights on every device, without CUDA random states
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
        **activation,
    )


def deepspeed_config(args: argparse.Namespace) -> dict:
    """Reads the JSON configuration and fills in missing keys from the flags."""
    config = json.loads(Path(args.deepspeed_config).read_text())
    batch_keys = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}
    if batch_keys.isdisjoint(config):
        config["train_batch_size"] = args.global_batch_size
        config["train_micro_batch_size_per_gpu"] = args.micro_batch_size
    adam = {
        "lr": args.lr,
        "betas": [args.adam_beta1, args.adam_beta2],
        "eps": args.adam_eps,
        "weight_decay": args.weight_decay,
        "torch_adam": True,  # DeepSpeed would compile its fused AdamW at start-up
    }
    optimizer = config.setdefault("optimizer", {"type": "AdamW", "params": adam})
    if "scheduler" not in config:
        config["scheduler"] = scheduler_config(args, optimizer.get("params", {}).get("lr", args.lr))
    config.setdefault("gradient_clipping", args.clip_grad)
    if (args.bf16 or args.fp16) and {"bf16", "bfloat16", "fp16"}.isdisjoint(config):
        config["bf16" if args.bf16 else "fp16"] = {"enabled": True}
    return config


def scheduler_config(args: argparse.Namespace, lr: float) -> dict:
    """Makes the scheduler's configuration: linear warm-up to the learning rate ``lr``, then the decay style.

    The rate then stays constant, decays linearly to zero, or follows a cosine to --min-lr. Raises SystemExit for a
    shorter warm-up than DeepSpeed has.
    """
    if args.lr_warmup_iters < 2:
        raise SystemExit(
            f"--lr-warmup-iters is {args.lr_warmup_iters}, but DeepSpeed's schedulers warm up over 2 iterations at "
            f"least; give 2 or more, or a scheduler in {args.deepspeed_config}"
        )
    params = {"warmup_num_steps": args.lr_warmup_iters, "warmup_type": "linear"}
    if args.lr_decay_style == "constant":
        return {"type": "WarmupLR", "params": params}
    params["total_num_steps"] = args.lr_decay_iters or args.train_iters
    if args.lr_decay_style == "linear":
        return {"type": "WarmupDecayLR", "params": {**params, "warmup_max_lr": lr}}
    return {"type": "WarmupCosineLR", "params": {**params, "cos_min_ratio": args.min_lr / lr}}
