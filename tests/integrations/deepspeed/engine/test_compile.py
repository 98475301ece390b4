"""``engine.compile()`` compiles the layers of a pipeline with a block, although their weights are freed and
gathered."""

import pytest
import torch

from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.models import Training
from tests.integrations.deepspeed.running import Layout, batches, initialize

TRAINING = Training(blocks=4, tuples=False, dropout=0.2)
STEPS = 2


def compiled_and_not():
    """Returns by recomputation the losses without and with compilation, and the number of compiled graphs."""
    prepare_rank()
    return {recompute: losses_of(recompute) for recompute in ("full", "none")}


def losses_of(recompute):
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.backends.registry.lookup_backend("aot_eager")(graph, inputs)

    torch.compiler.reset()
    losses = []
    for compiled in (False, True):
        torch.manual_seed(0)
        engine = initialize(TRAINING, Layout(2, 2, 3, {"layers_per_chunk": 1, "recompute": recompute}))
        if compiled:
            engine.compile(backend=counting)
        losses.append([engine.train_batch(batches(step, engine)).item() for step in range(STEPS)])
    return *losses, len(graphs)


@pytest.mark.slow
def test_compiled_layers_train_the_same():
    for rank in run_on_ranks(4, compiled_and_not):
        for eager, compiled, graphs in rank.values():
            assert compiled == pytest.approx(eager, rel=1e-6)
            assert graphs > 0, "nothing was compiled"
