"""``"compile"`` of the block compiles the layers of a pipeline, although their weights are freed and gathered: losses
are those without it, and nothing is compiled after step 2 that a new shape does not ask for."""

from itertools import chain
from typing import NamedTuple

import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn
from torch._dynamo.utils import counters

from ds_lgamp.config import ConfigError
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.linear import ONE_LAYER_PER_CHUNK, build, engine_of, linears
from tests.integrations.deepspeed.linear import batches as batches_of_linears
from tests.integrations.deepspeed.models import Training
from tests.integrations.deepspeed.running import Layout, initialize
from tests.runtime.models import micro_batch
from tests.slow import slow_except

BACKEND = "aot_eager"
TRAINING = Training(blocks=4, tuples=False, dropout=0.2)
TUPLES = Training(blocks=4)
LENGTHS = (16, 16, 16, 9, 16, 5, 9)
"""By step: how many tokens its samples have. From step 4 on, they have others than in the first ones."""
SETTLED = 4
"""After so many steps, all shapes have code."""


class Case(NamedTuple):
    stage: int = 3
    micro_batches: int = 4
    block: dict = {}
    zero: dict = {}
    training: Training = TRAINING
    options: dict | bool = {"backend": BACKEND}
    precision: float = 1e-6

    @property
    def layout(self) -> Layout:
        return Layout(2, 1, self.stage, {"layers_per_chunk": 1, **self.block}, zero=self.zero)


class Course(NamedTuple):
    losses: list[float]
    evaluations: list[float]
    graphs: list[int]
    """How many graphs have been compiled after each step with its evaluation."""


ON_HOST = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
CASES = {
    "gathered weights": Case(),
    "one micro-batch, nothing recomputed": Case(1, 1, {"recompute": "none"}, options={"backend": "eager"}),
    "tuples in groups": Case(2, 4, {"micro_batch_group": 2}, training=TUPLES, options={"backend": "eager"}),
    "on the host": Case(3, 2, {"offload_activations": "cpu"}, ON_HOST, options={"backend": "eager"}),
}
WIDE = [
    pytest.param(Case(stage, micro_batches, {"recompute": recompute}, training=training))
    for stage in range(4)
    for micro_batches in (1, 2, 4)
    for recompute in ("full", "none")
    for training in (TRAINING, TUPLES)
]


def courses(case: Case) -> tuple[Course, Course]:
    """Returns the course of a training without and with compilation."""
    prepare_rank()
    return course_of(case, {}), course_of(case, {"compile": case.options})


def course_of(case: Case, compiled: dict) -> Course:
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    layout = case.layout._replace(block={**case.layout.block, **compiled})
    engine = initialize(case.training, layout, gradient_accumulation_steps=case.micro_batches)
    course = Course([], [], [])
    for step, length in enumerate(LENGTHS):
        if length != LENGTHS[step - 1]:
            engine.reset_activation_shape()
        course.losses.append(engine.train_batch(batches(case, step, length)).item())
        course.evaluations.append(engine.eval_batch(batches(case, 50 + step, length)).item())
        course.graphs.append(counters["stats"]["unique_graphs"])
    return course


def batches(case: Case, step: int, length: int):
    return iter([tuple(each[:, :length] for each in micro_batch(step, number)) for number in range(case.micro_batches)])


def assert_same(case: Case) -> None:
    for plain, compiled in run_on_ranks(2, courses, case):
        assert compiled.losses == pytest.approx(plain.losses, rel=case.precision)
        assert compiled.evaluations == pytest.approx(plain.evaluations, rel=case.precision)
        assert plain.graphs[-1] == 0
        assert compiled.graphs[0] > 0, "nothing was compiled"
        assert compiled.graphs[2] == compiled.graphs[0], "shapes and weights were known"
        assert compiled.graphs[-1] == compiled.graphs[SETTLED - 1], "code for a new length is for any length"


@pytest.mark.parametrize("name", slow_except(["gathered weights", "tuples in groups"], [*CASES]))
def test_compiled_layers_train_the_same_and_are_compiled_once(name):
    assert_same(CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("case", WIDE)
def test_compiled_layers_train_the_same_at_every_stage(case):
    assert_same(case)


@pytest.mark.slow
def test_code_of_inductor_trains_the_same():
    # Its random numbers are others.
    assert_same(Case(training=TRAINING._replace(dropout=0.0), options=True))


class Sized(nn.Linear):
    """Runs other code once its input has had several lengths, which saves other tensors, as torch's own may."""

    def __init__(self, compiles):
        super().__init__(6, 6)
        graphs = []

        def backend(graph, inputs):
            graphs.append(graph)
            return graph if len(graphs) == 1 else lambda *given: graph(*map(once_more, given))

        self.curve = torch.compile(curved, backend=backend) if compiles else curved

    def forward(self, inputs):
        return self.curve(super().forward(inputs))


def once_more(given):
    """Returns what it gets. Autograd saves one tensor more, of the same shape."""
    return given * torch.ones_like(given) if isinstance(given, torch.Tensor) else given


def curved(inputs):
    return inputs.sin() * inputs


def two_lengths():
    """Returns the losses of layers that compile a function themselves, without and with that."""
    prepare_rank()
    runs = []
    for compiles in (False, True):
        torch.compiler.reset()
        specs = [LayerSpec(Sized, compiles) for _ in range(2)]
        engine = engine_of(build(specs, dynamic_shape=True), ONE_LAYER_PER_CHUNK, 1)
        runs.append([])
        for _ in range(2):
            micro_batches = chain.from_iterable(batches_of_linears(1, rows=rows) for rows in (4, 3))
            runs[-1].append(engine.train_batch(micro_batches).item())
    return runs


def test_recomputation_may_run_other_code_than_the_forward():
    for plain, compiled in run_on_ranks(2, two_lengths):
        assert compiled == pytest.approx(plain, rel=1e-6)


def complaints():
    """Returns what is refused of compilation, by what was asked."""
    prepare_rank()
    found = {}

    def note(name, ask, *arguments, **options):
        with pytest.raises(ConfigError) as refused:
            ask(*arguments, **options)
        found[name] = str(refused.value)

    def engine(asked):
        return engine_of(build(linears()), {**ONE_LAYER_PER_CHUNK, **asked}, 1)

    note("backend", engine, {"compile": {"backend": "inductro"}})
    note("mode", engine, {"compile": {"mode": "fast"}})
    compiled = engine({"compile": {"backend": "eager"}})
    # Accelerate passes torch's defaults.
    compiled.compile(backend="eager", compile_kwargs={"mode": "default", "fullgraph": False, "dynamic": None})
    note("other", compiled.compile, backend="aot_eager")
    note("graphs", engine({}).compile, compile_kwargs={"mode": "reduce-overhead"})
    note("autograd", engine({}).compile, compiled_autograd_enabled=True)
    return found


def test_what_cannot_be_compiled_is_refused_in_a_sentence():
    for found in run_on_ranks(2, complaints):
        assert "ds_lgamp.compile is {'backend': 'inductro'}, but" in found["backend"]
        assert "ds_lgamp.compile is {'mode': 'fast'}, but" in found["mode"]
        assert "compiled with {'backend': 'eager'} already" in found["other"]
        assert "use mode 'max-autotune-no-cudagraphs'" in found["graphs"]
        assert "compiled_autograd_enabled" in found["autograd"]
        assert not any("\n" in sentence for sentence in found.values())


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
