"""A script of transformers' Trainer that does not know ds_lgamp: trains a small GPT-2 or Llama on random tokens."""

import json
import sys
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def tiny(name: str):
    if Path(name).is_dir():
        return AutoModelForCausalLM.from_pretrained(name)
    if name == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=4, n_head=4, **NO_DROPOUT))
    return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS))


def examples(number: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Makes sequences of random tokens. The first tokens have no label: their number differs between sequences."""
    tokens = torch.randint(64, (number, 12), generator=torch.Generator().manual_seed(seed))
    unlabelled = [torch.arange(12) < n % 5 for n in range(number)]
    return [{"input_ids": row, "labels": row.masked_fill(mask, -100)} for row, mask in zip(tokens, unlabelled)]


def accuracy(predictions) -> dict[str, float]:
    guesses = predictions.predictions[:, :-1].argmax(-1)
    return {"accuracy": float((guesses == predictions.label_ids[:, 1:]).mean())}


def mean_logit(outputs, labels, num_items_in_batch=None) -> torch.Tensor:
    return outputs.logits.mean()


def main(words: list[str]) -> Trainer:
    parser = HfArgumentParser(TrainingArguments)
    parser.add_argument("--model", default="llama", help="llama, gpt2 or a folder that save_pretrained wrote")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--own_loss", action="store_true")
    arguments, rest = parser.parse_args_into_dataclasses(words)
    set_seed(arguments.seed)
    model = tiny(rest.model)
    if rest.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, lora_dropout=0.0, target_modules="all-linear"))
    data, unseen = examples(92, 0), examples(10, 1)
    metrics = None if arguments.prediction_loss_only else accuracy
    trainer = Trainer(
        model,
        arguments,
        train_dataset=data,
        eval_dataset=unseen,
        compute_metrics=metrics,
        compute_loss_func=mean_logit if rest.own_loss else None,
    )
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    trainer.save_model()
    if trainer.is_world_process_zero():
        Path(arguments.output_dir, "history.json").write_text(json.dumps(trainer.state.log_history))
    return trainer


if __name__ == "__main__":
    main(sys.argv[1:])
