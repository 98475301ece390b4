"""``engine.compile()`` compiles the layers of a pipeline with a block, although their weights are freed and
gathered."""

import pytest
import torch
from deepspeed.pipe import TiedLayerSpec
from torch import nn

from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.linear import ONE_LAYER_PER_CHUNK, build, engine_of
from tests.integrations.deepspeed.linear import batches as batches_of_linears
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


def scaled(inputs):
    return 2 * inputs


def transposed(module, inputs):
    return inputs @ module.weight.T


def compiled_functions():
    """Returns the graphs of layers that are functions, one of them of a tied module."""
    prepare_rank()
    graphs = []
    torch.compiler.reset()
    specs = [
        TiedLayerSpec("key", nn.Linear, 6, 6),
        scaled,
        TiedLayerSpec("key", nn.Linear, 6, 6, forward_fn=transposed),
    ]
    engine = engine_of(build([*specs, scaled]), ONE_LAYER_PER_CHUNK, 1)
    engine.compile(backend=lambda graph, inputs: graphs.append(str(graph.code)) or graph)
    engine.train_batch(batches_of_linears(2))
    return graphs


def test_layers_that_are_functions_are_compiled():
    first, second = run_on_ranks(2, compiled_functions)
    assert any("@" in graph or "matmul" in graph for graph in first), "the tied module's function"
    assert any("2" in graph for graph in second), "the plain function"


@pytest.mark.slow
def test_compiled_layers_train_the_same():
    for rank in run_on_ranks(4, compiled_and_not):
        for eager, compiled, graphs in rank.values():
            assert compiled == pytest.approx(eager, rel=1e-6)
            assert graphs > 0, "nothing was compiled"
