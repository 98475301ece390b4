"""At any layout, fp16 trains like one process that computes, accumulates and adds in the same types. Overflows have the
same effect as in stock DeepSpeed."""

from typing import NamedTuple

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from ds_lgamp.integrations.deepspeed.model.module import over_pipeline
from ds_lgamp.runtime.batch import ActionError
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed import linear
from tests.integrations.deepspeed.config.test_precision import STOCK, TRAINING, engine_of, master_weights
from tests.integrations.deepspeed.models import MICRO_BATCHES, build_layers, loss_of
from tests.integrations.deepspeed.running import Layout, batches, gathered
from tests.slow import chosen, slow_except

STEPS = 3
SCALE = 2.0**10
ADAM = {"lr": 0.01, "eps": 1e-4}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Case(NamedTuple):
    """A layout and the types of a run."""

    pipeline_ranks: int
    stage: int
    accumulation: str
    communication: str | None = None
    parameters: str = "fp16"
    group: int | str = "all"

    @property
    def data_ranks(self):
        return 4 // self.pipeline_ranks

    @property
    def scale(self):
        return SCALE if self.parameters == "fp16" else 1.0

    @property
    def clipping(self):
        return 0.0 if self.stage == 2 else 0.3

    def config(self):
        config = {
            "gradient_clipping": self.clipping,
            "fp16": {"enabled": self.parameters == "fp16", "loss_scale": SCALE},
            "data_types": {"grad_accum_dtype": self.accumulation},
        }
        return config if self.communication is None else {**config, "communication_data_type": self.communication}


CASES = [
    *(Case(2, stage, "fp32", group=3 if stage % 2 else "all") for stage in range(4)),
    *(Case(ranks, stage, "fp32") for ranks, stage in ((1, 0), (1, 3), (4, 1), (4, 2))),
    *(Case(2, stage, "fp16") for stage in (0, 3)),
    Case(2, 2, "bf16"),
    *(Case(2, stage, "fp32", "fp16") for stage in (0, 2)),
    Case(2, 1, "fp16", "fp32"),
    Case(2, 3, "fp16", "bf16"),
    Case(2, 0, "fp32", "bf16", parameters="fp32"),
    Case(2, 3, "fp32", "fp16", parameters="fp32"),
]
DEFAULT = [Case(2, 3, "fp32", group=3), Case(2, 2, "bf16")]
"""Cases that are not slow."""


class Run(NamedTuple):
    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, torch.Tensor]]
    """The gradients that the optimizer's step gets: averaged and still scaled."""
    weights: dict[str, torch.Tensor]
    """The weights in fp32 after the last step."""


def train(case, engine):
    run = Run([], [], [], {})
    partition, step_optimizer = engine.optimizer.partition, engine.optimizer.step

    def recording_step():
        run.gradients.append(gathered(partition, lambda unit: unit.reduction.shard_gradient))
        step_optimizer()

    engine.optimizer.step = recording_step
    for step in range(STEPS):
        run.losses.append(engine.train_batch(batches(step, engine)).item())
        run.norms.append(float(engine.get_global_grad_norm()))
    assert {parameter.dtype for parameter in engine.module.parameters()} == {DTYPES[case.parameters]}
    return run._replace(weights=master_weights(engine))


def train_on_one_process(case):
    """The ground truth. Each data-parallel rank's gradients accumulate separately, are converted, and are then
    added."""
    layers, parameters = build_layers(TRAINING)
    for parameter in parameters.values():
        parameter.data = parameter.data.to(DTYPES[case.parameters])
    # Copies the rounded parameters, as DeepSpeed does.
    masters = {name: nn.Parameter(parameter.detach().float().clone()) for name, parameter in parameters.items()}
    # DeepSpeed turns "Adam" into AdamW.
    optimizer = torch.optim.AdamW(masters.values(), **ADAM)
    accumulation = DTYPES[case.accumulation]
    communication = accumulation if case.communication is None else DTYPES[case.communication]
    # An all-reduce adds in the type that travels. Parts are added in fp32.
    adds = communication if case.stage == 0 else torch.float32
    run = Run([], [], [], {})
    for step in range(STEPS):
        loss, sums = 0.0, [torch.zeros_like(master, dtype=adds) for master in masters.values()]
        for rank in range(case.data_ranks):
            own = [torch.zeros_like(master, dtype=accumulation) for master in masters.values()]
            for index in range(MICRO_BATCHES):
                each = loss_of(layers, step, MICRO_BATCHES * rank + index)
                root = torch.tensor(case.scale / MICRO_BATCHES)
                for mine, gradient in zip(own, torch.autograd.grad(each, parameters.values(), root)):
                    mine.add_(gradient)
                loss += each.item() / MICRO_BATCHES / case.data_ranks
            for total, mine in zip(sums, own):
                # A sum soon exceeds fp16's range, so its terms are divided first.
                total.add_((mine / case.data_ranks if communication == torch.float16 else mine).to(communication))
        for master, total in zip(masters.values(), sums):
            master.grad = total.float() / (1 if communication == torch.float16 else case.data_ranks)
        run.losses.append(loss)
        run.gradients.append({name: master.grad.clone() for name, master in masters.items()})
        squares = [torch.linalg.vector_norm(master.grad, dtype=torch.float64) ** 2 for master in masters.values()]
        run.norms.append(torch.stack(squares).sum().sqrt().item() / case.scale)
        for master in masters.values():
            limit = case.clipping or float("inf")
            master.grad.mul_(min(1.0, limit / (run.norms[-1] + 1e-6)) / case.scale)
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(parameters.values(), masters.values()):
                parameter.copy_(master)
    return run._replace(weights={name: master.detach() for name, master in masters.items()})


def whole(engine, run):
    """Returns the run with the tensors of all pipeline ranks."""
    everyone = over_pipeline(engine.module, (run.gradients, run.weights))
    gradients = [{k: v for steps, _ in everyone for k, v in steps[step].items()} for step in range(STEPS)]
    return run._replace(gradients=gradients, weights={k: v for _, weights in everyone for k, v in weights.items()})


DYNAMIC = {
    "scale found": {"initial_scale_power": 20, "loss_scale_window": 2, "hysteresis": 1},
    "hysteresis": {"initial_scale_power": 12, "loss_scale_window": 2, "hysteresis": 3},
    "consecutive": {
        **{"initial_scale_power": 4, "loss_scale_window": 1, "min_loss_scale": 12},
        **{"hysteresis": 2, "consecutive_hysteresis": True},
    },
    "static": {"loss_scale": 128.0},
}
INFINITE = {"hysteresis": {0, 1, 3}, "consecutive": {1, 3, 4}, "static": {1, 2}}
"""Steps, counted from 0, with an infinite loss."""
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9, "warmup_type": "linear"}}}


def history(layout, name):
    """Returns for each of eight steps the scale, the skipped steps, whether the step was applied, and the learning
    rate; and the losses."""
    engine = engine_of(layout, {"fp16": {"enabled": True, **DYNAMIC[name]}, **WARMUP})
    loss_fn, steps, losses = engine.module.loss_fn, [], []
    for step in range(8):
        factor = float("inf") if step in INFINITE.get(name, ()) else 1.0
        engine.module.loss_fn = lambda outputs, labels, factor=factor: loss_fn(outputs, labels) * factor
        losses.append(engine.train_batch(batches(step, engine)).item())
        optimizer = engine.optimizer
        assert optimizer.loss_scale == optimizer.cur_scale == optimizer.loss_scaler.loss_scale
        assert optimizer.cur_scale == engine._get_optimizer_loss_scale(), "monitors get another scale"
        assert optimizer.dynamic_loss_scale == (name != "static")
        steps.append((optimizer.cur_scale, engine.skipped_steps, engine.was_step_applied(), engine.get_lr()[0]))
    return steps, losses


def overflow_of_one_rank(stage):
    """Makes one gradient of one data-parallel rank of one pipeline rank infinite in a step.

    Returns for this step and the next: whether all state and whether any state stayed, the skipped steps and the scale.
    """
    engine = engine_of(Layout(2, 2, stage, {}), {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}})
    engine.train_batch(batches(0, engine))
    infinite = torch.tensor(1.0)
    # A parameter can only be hooked while it is complete.
    with engine.optimizer.partition.full_parameters():
        if engine.global_rank == 3:
            next(engine.module.parameters()).register_hook(lambda gradient: gradient * infinite)
    after_steps = []
    for step, factor in ((1, float("inf")), (2, 1.0)):
        infinite.fill_(factor)
        before = state_of(engine)
        engine.train_batch(batches(step, engine))
        stayed = [torch.equal(old, new) for old, new in zip(before, state_of(engine))]
        after_steps.append((all(stayed), any(stayed), engine.skipped_steps, engine.optimizer.cur_scale))
    return after_steps


def state_of(engine):
    """Returns master weights and moments of this rank."""
    optimizer = engine.optimizer
    units = [unit.master.values.clone() for unit in optimizer.partition.units]
    return units + [moments[key].clone() for moments in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]


def half_loss(**fp16):
    """Trains with a loss in fp16 and one micro-batch, so the root gradient is the scale. Inputs are fp32.

    Returns scale and skipped steps.
    """
    module = linear.build(linear.linears(3))
    loss_fn = module.loss_fn
    module.loss_fn = lambda output, target: loss_fn(output, target.half())
    settings = {"fp16": {"enabled": True, "hysteresis": 1, **fp16}}
    engine = linear.engine_of(module, {}, stage=2, micro_batches=1, **settings)
    steps = []
    for step in range(2):
        engine.train_batch(linear.batches(1, start=step))
        steps.append((engine.optimizer.cur_scale, engine.skipped_steps))
    with torch.no_grad():
        engine.eval_batch(linear.batches(1))
    return steps


def resume(folder):
    """Returns losses and scales of a run after it saved, and of a run that resumes from there."""
    config = {"fp16": {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 2}}
    first, second = (engine_of(Layout(2, 2, 2, {}), config) for _ in range(2))
    run(first, range(3))
    first.save_checkpoint(folder)
    run(second, range(1))
    second.load_checkpoint(folder)
    return run(first, range(3, 7)), run(second, range(3, 7))


def resume_without_optimizer(folder, layout):
    """Returns the scale that a run has saved, and that of a new run which then loads the rest without the state of the
    optimizer."""
    engines = [engine_of(layout, {"fp16": {"enabled": True, "initial_scale_power": power}}) for power in (6, 8)]
    run(engines[0], range(1))
    engines[0].save_checkpoint(folder)
    engines[1].load_checkpoint(folder, load_optimizer_states=False)
    return [engine.optimizer.cur_scale for engine in engines]


def run(engine, steps):
    return [(engine.train_batch(batches(step, engine)).item(), engine.optimizer.cur_scale) for step in steps]


def overridden():
    """Sets the scale as a user would, before and after an overflow."""
    engine = engine_of(Layout(2, 2, 1, {}), {"fp16": {"enabled": True}})
    engine.optimizer.override_loss_scale(SCALE)
    engine.optimizer.loss_scale *= 2.0**40
    scales = run(engine, range(1)), engine.skipped_steps
    engine.optimizer.loss_scale = SCALE
    return scales, run(engine, range(2)), engine.skipped_steps


def exhausted():
    """Returns the error that is raised when the scale cannot be lowered."""
    engine = engine_of(Layout(2, 2, 1, {}), {"fp16": {"enabled": True, "initial_scale_power": 0, "hysteresis": 1}})
    loss_fn = engine.module.loss_fn
    engine.module.loss_fn = lambda outputs, labels: loss_fn(outputs, labels) * float("inf")
    with pytest.raises(ActionError) as raised:
        engine.train_batch(batches(0, engine))
    return str(raised.value)


def run_all(folder, cases, histories, stages):
    prepare_rank()
    # torch computes fp16 on any CPU, but DeepSpeed's CPU accelerator reports it only with oneDNN.
    get_accelerator().is_fp16_supported = lambda: True
    runs = {}
    for case in cases:
        engine = engine_of(
            Layout(case.pipeline_ranks, case.data_ranks, case.stage, {"micro_batch_group": case.group}), case.config()
        )
        runs[case] = whole(engine, train(case, engine))
    references = [train_on_one_process(case) for case in cases] if torch.distributed.get_rank() == 0 else []
    return {
        "runs": runs,
        "references": dict(zip(cases, references)),
        "history": {name: (history(Layout(2, 2, 2, {}), name), history(STOCK, name)) for name in histories},
        "one rank": {stage: overflow_of_one_rank(stage) for stage in stages},
        "half loss": half_loss(auto_cast=True),
        "resumed": resume(folder),
        "without optimizer": [
            resume_without_optimizer(f"{folder}/{name}", layout)
            for name, layout in (("block", Layout(2, 2, 2, {})), ("stock", STOCK))
        ],
        "overridden": overridden(),
        "exhausted": exhausted(),
    }


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    cases = [case for case in CASES if case in chosen(request, "case")]
    histories, stages = sorted(chosen(request, "name")), sorted(chosen(request, "stage"))
    return run_on_ranks(4, run_all, str(tmp_path_factory.mktemp("checkpoint")), cases, histories, stages)


@pytest.mark.parametrize("case", slow_except(DEFAULT, CASES), ids=lambda case: "-".join(map(str, case)))
def test_every_layout_trains_like_one_process_in_the_same_types(ranks, case):
    run, reference = ranks[0]["runs"][case], ranks[0]["references"][case]
    assert run.losses == pytest.approx(reference.losses, rel=1e-6)
    assert run.norms == pytest.approx(reference.norms, rel=1e-5)
    first, *others = [distance(*pair) for pair in zip(run.gradients, reference.gradients)]
    # In later steps, a weight between two fp16 numbers may round to the other one.
    assert first < 1e-8 and max(others) < 1e-3
    assert distance(run.weights, reference.weights) < 1e-5


def distance(tensors, expected):
    assert tensors.keys() == expected.keys()
    error = torch.stack([(tensors[name] - expected[name]).norm() for name in expected]).norm()
    return (error / torch.stack([tensor.norm() for tensor in expected.values()]).norm()).item()


HISTORIES = slow_except(["hysteresis"], list(DYNAMIC))


@pytest.mark.parametrize("name", HISTORIES)
def test_the_scale_moves_and_steps_are_skipped_as_in_stock(ranks, name):
    for rank in ranks:
        (steps, losses), (stock, stock_losses) = rank["history"][name]
        assert steps == stock and steps[-1][1] > 0
        assert losses == pytest.approx(stock_losses, rel=1e-2)


@pytest.mark.parametrize("name", HISTORIES)
def test_the_scale_of_a_history_goes_down_and_up_unless_it_is_static(ranks, name):
    """The comparison above needs scales that change in both directions."""
    (steps, _), _ = ranks[0]["history"][name]
    scales = [step[0] for step in steps]
    if name == "static":
        assert set(scales) == {128.0}
        return
    assert {after > before for before, after in zip(scales, scales[1:]) if after != before} == {True, False}
    assert name != "consecutive" or 12 in scales


@pytest.mark.parametrize("stage", slow_except([3], range(4)))
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks, stage):
    for rank in ranks:
        overflow, after = rank["one rank"][stage]
        assert overflow == (True, True, 1, 128.0), "weights and moments stay, and the scale is halved"
        assert after == (False, False, 1, 128.0)


def test_a_scale_beyond_fp16_is_an_overflow_and_no_error(ranks):
    for rank in ranks:
        assert rank["half loss"] == [(2.0**15, 1), (2.0**15, 1)]


def test_a_resumed_run_goes_on_with_the_scale(ranks):
    for rank in ranks:
        uninterrupted, resumed = rank["resumed"]
        assert resumed == uninterrupted
        assert len({scale for _, scale in resumed}) > 1


def test_without_the_state_of_the_optimizer_a_run_keeps_its_own_scale_as_in_stock(ranks):
    for rank in ranks:
        assert rank["without optimizer"] == [[2.0**6, 2.0**8]] * 2


def test_a_scale_of_the_users_own_stays(ranks):
    for rank in ranks:
        ((_, scale),), skipped = rank["overridden"][0]
        assert (scale, skipped) == (SCALE * 2.0**40, 1)
        steps, skipped = rank["overridden"][1:]
        assert [scale for _, scale in steps] == [SCALE, SCALE] and skipped == 1


def test_a_scale_that_cannot_be_lowered_ends_the_run_on_all_ranks(ranks):
    for rank in ranks:
        assert "failed at STEP" in rank["exhausted"] and "loss scale already at minimum" in rank["exhausted"]
