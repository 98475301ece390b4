"""Trains a small GPT in bf16 whose optimizer updates copies in fp32, with moments in fp32 or in 8 bits, or the bf16
weights themselves, rounded to the nearest number or by chance: ``python -m benchmarks run bf16_state``.

It trains 500 steps on text that can be learned and compares the losses, at a learning rate whose updates bf16 has and
at one whose updates it loses.
"""

from functools import partial
from typing import Any

from benchmarks.contenders import Contender, Layout
from benchmarks.contenders.lgamp import Layered
from benchmarks.curves import EXACT, STEPS, Comparison, compare_losses
from benchmarks.model import ADAM_EPSILON, ModelSize
from benchmarks.quantised import LEARNS
from benchmarks.record import OURS, Record, begin

NAME = "bf16_state"
LEARNING_RATES = (1e-3, 1e-4)
IN_8_BITS = f"{OURS}, moments in 8 bits"
NEAREST, BY_CHANCE = f"{OURS}, state in bf16, nearest", f"{OURS}, state in bf16, by chance"


def contenders(learning_rate: float) -> list[Contender]:
    """Returns them with the learning rate of AdamW."""
    adam = {"type": "AdamW", "params": {"lr": learning_rate, "eps": ADAM_EPSILON, "weight_decay": 0.01}}
    whole = {"optimizer": adam, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    half = {**whole, "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    layered = partial(Layered, zero_stage=1, resident_chunks=2)
    return [
        Contender(EXACT, partial(layered, more=whole)),
        Contender(IN_8_BITS, partial(layered, more=whole, optimizer=partial(_in_8_bits, learning_rate)), rounds=True),
        Contender(NEAREST, partial(layered, more=half)),
        Contender(BY_CHANCE, partial(layered, more=half, stochastic_rounding=True), rounds=True),
    ]


def _in_8_bits(learning_rate: float, parameters: Any) -> Any:
    # Only this benchmark needs it.
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(parameters, lr=learning_rate, eps=ADAM_EPSILON, weight_decay=0.01)


def run(learns: ModelSize = LEARNS, steps: int = STEPS) -> Record:
    """Compares the losses of ``steps`` steps at every learning rate."""
    record = begin(NAME)
    for learning_rate in LEARNING_RATES:
        comparison = Comparison(partial(contenders, learning_rate), 1, config={"learning_rate": learning_rate})
        compare_losses(record, Layout(1, 1, learns), comparison, steps)
    return record
