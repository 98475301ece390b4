"""Small Llamas that bitsandbytes or torchao has quantised, with adapters of peft, and their training on one process."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import deepspeed
import peft
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from testing.deepspeed_rank import quiet

CLIPPING, MICRO_BATCHES = 0.5, 2
ADAM = {"lr": 1e-2, "eps": 1e-4}
_FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}
QUANTISED = {
    "nf4": {**_FOUR_BITS, "bnb_4bit_quant_type": "nf4"},
    "nf4 twice": {**_FOUR_BITS, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4 stored in bf16": {**_FOUR_BITS, "bnb_4bit_quant_type": "fp4", "bnb_4bit_quant_storage": torch.bfloat16},
    "8 bits": {"load_in_8bit": True},
    "fp4 stored in fp32": {**_FOUR_BITS, "bnb_4bit_quant_type": "fp4", "bnb_4bit_quant_storage": torch.float32},
}
TORCHAO = {
    "torchao, 8 bits": ("Int8WeightOnlyConfig", {}),
    "torchao, 4 bits": ("IntxWeightOnlyConfig", {"weight_dtype": torch.int4}),
}
"""By kind: the configuration of torchao that quantises so."""


class Case(NamedTuple):
    kind: str = "nf4 twice"
    pipeline_ranks: int = 1
    stage: int = 3
    block: dict = {}
    precision: str = "fp32"
    seed: int = 0
    """Of the base, before it is quantised."""
    zero: dict = {}
    moments_in_8_bits: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float32


def base(folder: Path | str, seed: int = 0) -> None:
    """Writes a small Llama. Its ``save_pretrained`` would do so on the first rank alone."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=96, num_hidden_layers=3, max_position_embeddings=64, **sizes)
    state = {name: each.contiguous() for name, each in LlamaForCausalLM(config).state_dict().items()}
    save_file(state, Path(folder, "model.safetensors"), metadata={"format": "pt"})
    config.save_pretrained(folder)


def quantised(case: Case, adapters: bool = True) -> torch.nn.Module:
    """Returns the model as the documents of peft build it for QLoRA."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with TemporaryDirectory() as folder:
        base(folder, case.seed)
        asked = BitsAndBytesConfig(**QUANTISED[case.kind]) if case.kind in QUANTISED else None
        model = LlamaForCausalLM.from_pretrained(folder, quantization_config=asked, dtype=case.dtype)
    if case.kind in TORCHAO:
        # Tests that need it are skipped without it.
        from torchao import quantization

        name, options = TORCHAO[case.kind]
        quantization.quantize_(model.model, getattr(quantization, name)(**options))
    model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if adapters:
        targets = ["q_proj", "v_proj", "down_proj"]
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, target_modules=targets))
        generator = torch.Generator().manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.train()


def micro_batch(step: int, rank: int, number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + number)
    tokens = torch.randint(0, 96, (2, 12), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def config_of(case: Case) -> dict:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": CLIPPING,
        "optimizer": {"type": "AdamW", "params": {**ADAM, "torch_adam": True}},
        "zero_optimization": {"stage": case.stage, **case.zero},
        "ds_lgamp": {"pipeline_ranks": case.pipeline_ranks, **case.block},
    }
    return config | ({"bf16": {"enabled": True}} if case.precision == "bf16" else {})


def engine_of(case: Case, model: torch.nn.Module | None = None):
    model = quantised(case) if model is None else model
    if case.kind in TORCHAO:
        from torchao.utils import unwrap_tensor_subclass

        unwrap_tensor_subclass(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    config, optimizer = config_of(case), None
    if case.moments_in_8_bits:
        del config["optimizer"]
        optimizer = adam_of(case, trained)
    with quiet():
        engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, optimizer=optimizer, config=config)
    return engine


def adam_of(case: Case, parameters) -> torch.optim.Optimizer:
    if not case.moments_in_8_bits:
        return torch.optim.AdamW(parameters, **ADAM)
    # Tests that need it are skipped without it.
    import bitsandbytes

    # Adapters as small as these have moments of 32 bits by default.
    return bitsandbytes.optim.PagedAdamW8bit(parameters, **ADAM, min_8bit_size=256)


def train(engine, steps: range) -> tuple[list[float], list[float]]:
    """Returns the mean losses and the norms of the steps."""
    losses, norms = [], []
    for step in steps:
        total = torch.zeros(())
        for number in range(MICRO_BATCHES):
            loss = engine(**micro_batch(step, dist.get_rank(), number)).loss
            engine.backward(loss)
            engine.step()
            total += loss.detach().cpu()
        dist.all_reduce(total)
        losses.append(total.item() / MICRO_BATCHES / dist.get_world_size())
        norms.append(float(engine.get_global_grad_norm()))
    return losses, norms


def reference(case: Case, ranks: int, steps: int) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Returns losses and norms of the training on one process, and the adapters after it."""
    return _trained_alone(case.kind, case.precision, case.seed, case.moments_in_8_bits, ranks, steps)


@cache
def _trained_alone(
    kind: str, precision: str, seed: int, moments_in_8_bits: bool, ranks: int, steps: int
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    case = Case(kind, precision=precision, seed=seed, moments_in_8_bits=moments_in_8_bits)
    model = quantised(case)
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    optimizer = adam_of(case, trained.values())
    losses, norms = [], []
    for step in range(steps):
        total = 0.0
        for rank in range(ranks):
            for number in range(MICRO_BATCHES):
                loss = model(**micro_batch(step, rank, number)).loss / MICRO_BATCHES / ranks
                loss.backward()
                total += loss.item()
        losses.append(total)
        norms.append(torch.nn.utils.clip_grad_norm_(trained.values(), CLIPPING).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: each.detach() for name, each in trained.items()}
