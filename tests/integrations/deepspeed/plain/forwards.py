"""What the forward of a model of transformers does beside computing. The functions run on ranks."""

import torch
import torch.distributed as dist

import ds_lgamp
from ds_lgamp.runtime.executor import ActionError
from testing.deepspeed_rank import prepare_rank
from tests.integrations.deepspeed.plain.calls import prepared, train
from tests.integrations.deepspeed.plain.mistakes import note_failure
from tests.integrations.deepspeed.plain.training import MICRO_BATCHES, configuration, initialize
from tests.integrations.transformers.models import make, micro_batch
from tests.integrations.transformers.test_behind_blocks import penalising
from tests.integrations.transformers.test_hooks import shift_tokens, triple_loss

CLASSIFYING = "AutoModelForSequenceClassification"


def evaluate_with_hooks() -> tuple[list[float], list[float]]:
    """Returns losses of the engine and of the model that is called directly, before hooks of the model are registered
    and after it."""
    model, engine = prepared("Llama", 2)
    engine.eval()
    batch = micro_batch(7, dist.get_rank(), 0)
    losses: tuple[list[float], list[float]] = [], []
    for _ in range(2):
        for called, seen in zip((engine, model), losses):
            with torch.no_grad():
                seen.append(called(**batch).loss.item())
        model.register_forward_pre_hook(shift_tokens, with_kwargs=True)
        model.register_forward_hook(triple_loss)
    return losses


def learn_problem_types(pipeline_ranks: int) -> tuple[list[str | None], int]:
    """Trains a classifier for two steps. Returns the configuration's problem type before and after the first batch, and
    how often ranks told each other about it."""
    prepare_rank()
    ds_lgamp.install()
    model = make("BERT", CLASSIFYING)
    engine = initialize(model, configuration(1, {"pipeline_ranks": pipeline_ranks}))
    told, tell = [], engine._exchange.of_rank
    engine._exchange.of_rank = lambda *given: told.append(given) or tell(*given)
    types = []
    for step in range(2):
        types.append(model.config.problem_type)
        batches = (micro_batch(step, dist.get_rank(), number) for number in range(MICRO_BATCHES))
        train(engine, *({**batch, "labels": torch.tensor([0, 1])} for batch in batches))
    return [*types, model.config.problem_type], len(told)


def misuse_models() -> dict[str, str]:
    """Makes mistakes with models of transformers. Returns the errors."""
    prepare_rank()
    ds_lgamp.install()
    errors: dict[str, str] = {}
    config = configuration(1, {"pipeline_ranks": 2}, micro_batches=1)
    note_failure(errors, "compiled", initialize, torch.compile(make("Llama"), backend="eager"), config)
    engine = initialize(make("Llama"), config)
    output = engine(**micro_batch(0, dist.get_rank(), 0))
    note_failure(errors, "logits", lambda: output.logits)
    note_failure(errors, "get", lambda: output.get("logits"))
    assert output.get("aux_loss", None) is None and output.get("loss") is output.loss
    return errors


def train_on_more_than_the_last_layer() -> str:
    """Returns the error of a loss that depends on a block, which this rank has."""
    prepare_rank()
    ds_lgamp.install()
    errors: dict[str, str] = {}
    engine = initialize(penalising("layers.3.mlp.up")(make("Llama")), configuration(1, {}, micro_batches=1))
    note_failure(errors, "block", lambda: engine(**micro_batch(0, dist.get_rank(), 0)), error=ActionError)
    return errors["block"]
