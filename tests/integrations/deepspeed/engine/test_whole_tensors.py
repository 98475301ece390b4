"""LAMB and Muon behind ``deepspeed.initialize`` take the steps of one process on whole tensors.

The final gradients of every step are recorded, whole. The reference steps with them.
"""

import gc
from typing import NamedTuple

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
from torch.nn import Parameter

import ds_lgamp
from ds_lgamp.integrations.deepspeed.explain.explain import explain
from ds_lgamp.optimizers.lamb import Lamb
from ds_lgamp.optimizers.muon import Muon
from ds_lgamp.partition.agreement import everyone
from ds_lgamp.partition.unit import parts_of
from ds_lgamp.runtime.measure import CollectiveCounter, PeakMemory, live_tensors
from testing.deepspeed_rank import prepare_rank, quiet
from testing.prompt_gloo import prompt_exchanges
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.config.bad_modules import FusedLAMB, FusedLamb
from tests.integrations.deepspeed.models import MICRO_BATCHES, Training, pipeline_module
from tests.integrations.deepspeed.running import batches
from tests.optimizers.reference import ReferenceLamb
from tests.runtime.models import micro_batch

STEPS = 5
BLOCK = {"layers_per_chunk": 2, "placement": "modular"}
RATES = [0.01, 0.02, 0.03, 0.02, 0.01]
OF_MATRICES = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}
OF_OTHERS = {"lr": 0.004, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}


CHECKED = {"bf16": {"enabled": True, "check_grad_overflow": True}}
DYNAMIC = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}


class Case(NamedTuple):
    optimizer: str
    """A key of :data:`MADE`, or JSON and the name."""
    stage: int
    training: Training = Training(blocks=4)
    settings: dict = {}
    scheduled: bool = False


def is_matrix(name, shape):
    """What DeepSpeed marks with use_muon."""
    return len(shape) > 1 and "embed" not in name


def groups_of(module):
    named = list(module.named_parameters())
    matrices = [parameter for name, parameter in named if is_matrix(name, parameter.shape)]
    others = [parameter for name, parameter in named if not is_matrix(name, parameter.shape)]
    of_matrices = {**OF_MATRICES, "ns_method": "standard"}
    return [{"params": matrices, "use_muon": True, **of_matrices}, {"params": others, "use_muon": False, **OF_OTHERS}]


def groups_of_some(module):
    """Matrices of later layers come in an earlier group, between two groups of others."""
    matrices, others = groups_of(module)
    cut, end = len(matrices["params"]) // 2, {**others, "params": others["params"][:1]}
    first, second = ({**matrices, "params": own} for own in (matrices["params"][cut:], matrices["params"][:cut]))
    return [end, first, {**others, "params": others["params"][1:]}, second]


MADE = {
    "torch's Muon": lambda module: torch.optim.Muon(groups_of(module)[0]["params"], **OF_MATRICES),
    "MuonWithAuxAdam": lambda module: MuonWithAuxAdam(
        [{key: value for key, value in group.items()} for group in groups_of(module)]
    ),
    "own Muon": lambda module: Muon(groups_of(module)),
    "Muon in groups": lambda module: Muon(groups_of_some(module)),
    "FusedLamb": lambda module: FusedLamb(module.parameters(), lr=0.01, weight_decay=0.1),
    "apex's FusedLAMB": lambda module: FusedLAMB(
        [
            {"params": [p for p in module.parameters() if (p.dim() > 1) == decays], "weight_decay": 0.1 * decays}
            for decays in (True, False)
        ],
        lr=0.01,
    ),
}
JSON = {
    "Lamb": {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-6, "max_coeff": 5.0},
    "Muon": {
        "muon_lr": 0.01,
        "adam_lr": 0.004,
        "momentum": 0.9,
        "weight_decay": 0.1,
        "eps": 1e-6,
        "ns_method": "standard",
    },
}


def arguments_of(case, pipeline_ranks=2):
    """Returns the arguments of deepspeed.initialize."""
    ds_lgamp.install()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": case.training.clipping,
        "zero_optimization": {"stage": case.stage},
        "ds_lgamp": BLOCK,
        **case.settings,
    }
    with quiet():
        module = pipeline_module(case.training, pipeline_ranks)
    if case.optimizer in JSON:
        named = {"type": case.optimizer, "params": JSON[case.optimizer]}
        return {"model": module, "config": {**config, "optimizer": named}}
    return {"model": module, "config": config, "optimizer": MADE[case.optimizer](module)}


def engine_of(case, pipeline_ranks=2):
    arguments = arguments_of(case, pipeline_ranks)
    if case.scheduled:
        factors = [lambda step: RATES[min(step, STEPS - 1)] / RATES[0]] * len(arguments["optimizer"].param_groups)
        arguments["lr_scheduler"] = torch.optim.lr_scheduler.LambdaLR(arguments["optimizer"], factors)
    with quiet():
        return deepspeed.initialize(**arguments)[0]


def whole(engine, values):
    """Returns the whole tensors of all parameters that train, of ``values(unit)``, which is laid out as the shard."""
    return {
        part.name: part.gather(values(unit)[part.in_shard].detach().float())
        for unit in engine.optimizer.partition.units
        for part in parts_of(unit)
        if part.group is not None
    }


class Recording:
    """Records the whole gradients and the learning rates of every step, the memory it takes, and what the last one
    communicates."""

    def __init__(self, engine):
        self.engine, self.gradients, self.rates, self._taken, self.last = engine, [], [], [], None
        optimizer = engine.optimizer.optimizer
        self.matrices = {
            part.name
            for unit in engine.optimizer.partition.units
            for part in parts_of(unit)
            if part.group is not None and optimizer.param_groups[part.group].get("use_muon")
        }
        self._step = optimizer.step
        optimizer.step = self

    def __call__(self):
        self.gradients.append(whole(self.engine, lambda unit: unit.reduction.shard_gradient))
        self.rates.append([group["lr"] for group in self.engine.optimizer.param_groups])
        with PeakMemory(live_tensors()) as memory, CollectiveCounter() as counter, prompt_exchanges():
            before = memory.live()
            self._step()
        self._taken.append(memory.peak - before)
        self.last = counter.collectives(), sum(counter.bytes_sent.values())

    @property
    def taken(self):
        """The bytes that a step takes. On a busy machine gloo's threads hold tensors for longer in some."""
        return min(self._taken[-3:])


def reference(case, before, recording):
    """Returns the weights after steps on whole tensors."""
    weights = {name: Parameter(tensor.clone()) for name, tensor in before.items()}
    kind = "lamb" if "lamb" in case.optimizer.lower() else "muon"
    if kind == "lamb":
        is_apex = "apex" in case.optimizer
        decay = {name: 0.0 if is_apex and tensor.dim() == 1 else 0.1 for name, tensor in before.items()}
        largest = JSON["Lamb"]["max_coeff"] if case.optimizer == "Lamb" else 10.0
        bounds = {"paper": True, "always": False, "bounds": (0.0, float("inf"))} if is_apex else {}
        lamb = ReferenceLamb(before, 0.01, decay, **{"bounds": (0.01, largest), **bounds})
        for rates, gradients in zip(recording.rates, recording.gradients):
            lamb.lr = rates[0]
            lamb.step(gradients)
        return lamb.weights
    matrices = [weight for name, weight in weights.items() if name in recording.matrices]
    others = [weight for name, weight in weights.items() if name not in recording.matrices]
    optimizers = [torch.optim.Muon(matrices, **OF_MATRICES)] if matrices else []
    optimizers += [torch.optim.AdamW(others, foreach=False, **OF_OTHERS)] if others else []
    for rates, gradients in zip(recording.rates, recording.gradients):
        for name, gradient in gradients.items():
            weights[name].grad = gradient
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = rates[int(isinstance(optimizer, torch.optim.AdamW))]
            optimizer.step()
    return {name: tensor.detach() for name, tensor in weights.items()}


def train(case):
    """Returns the largest difference from the reference, relative to a tensor's norm, what the last step of the
    optimizer communicated, counted and predicted, and what steps took in memory, measured and predicted."""
    predicted = prediction(case)
    engine = engine_of(case)
    before = whole(engine, lambda unit: unit.master.values)
    recording = Recording(engine)
    losses = [engine.train_batch(batches(step, engine)).item() for step in range(STEPS)]
    after, expected = whole(engine, lambda unit: unit.master.values), reference(case, before, recording)
    kind = type(engine.optimizer.optimizer)
    assert kind is (Lamb if "lamb" in case.optimizer.lower() else Muon)
    assert len(recording.gradients) == STEPS and losses[-1] < losses[0]
    assert any(not torch.equal(after[name], before[name]) for name in after)
    difference = max(float((after[name] - expected[name]).norm() / expected[name].norm()) for name in after)
    communicated, memory = predicted[engine.stage_id]
    return difference, recording.last, communicated, recording.taken, memory


def prediction(case, pipeline_ranks=2):
    """Returns what ``--explain`` predicts of collectives and bytes, and of memory, by pipeline rank."""
    arguments = arguments_of(case, pipeline_ranks)
    module, config = arguments["model"], arguments["config"]
    with quiet():
        made = DeepSpeedConfig(config, module.mpu())
    facts = explain({**arguments, "config_class": made}, "parameters")
    # Storages that are collected within a step would change what it seems to take.
    gc.collect()
    return [((rank.update_collectives, rank.update_bytes_sent), rank.memory.update) for rank in facts.ranks]


def communicate_in_groups():
    """Returns what the last step communicated, counted and predicted, if matrices are in several groups."""
    case = Case("Muon in groups", 1)
    communicated, _ = prediction(case, 1)[0]
    engine = engine_of(case, 1)
    recording = Recording(engine)
    for step in range(2):
        engine.train_batch(batches(step, engine))
    return recording.last, communicated


def state_of(engine):
    """Returns the whole weights and state tensors of all parameters, by name."""
    optimizer = engine.optimizer.optimizer
    tensors = {("weight", name): tensor for name, tensor in whole(engine, lambda unit: unit.master.values).items()}
    for unit in engine.optimizer.partition.units:
        for part in parts_of(unit):
            keys = ("exp_avg", "exp_avg_sq") if "lamb" in engine.optimizer.class_name.lower() else ("momentum_buffer",)
            if part.group is not None and optimizer.param_groups[part.group].get("use_muon") is False:
                keys = ("exp_avg", "exp_avg_sq")
            for key in keys if part.group is not None else ():
                state = None if part.segment is None else optimizer.state[part.segment.shard][key]
                begin = 0 if part.segment is None else part.in_shard.start - part.segment.start
                own = unit.master.values[:0] if state is None else state[begin : begin + part.numel]
                tensors[key, part.name] = part.gather(own.detach())
    return tensors


def resume(case, folder):
    """Saves at two pipeline ranks and loads at one, at another stage. Returns whether the state is the same to the bit,
    and the losses that follow at both."""
    writer = engine_of(case)
    for step in range(2):
        writer.train_batch(batches(step, writer))
    writer.save_checkpoint(folder, tag=case.optimizer)
    before = everywhere(state_of(writer))
    went_on = [writer.train_batch(batches(step, writer)).item() for step in (2, 3)]
    micro_batches = {"gradient_accumulation_steps": MICRO_BATCHES // 2}
    reader = engine_of(case._replace(stage=3 - case.stage, settings={**case.settings, **micro_batches}), 1)
    reader.load_checkpoint(folder, tag=case.optimizer)
    after = state_of(reader)
    same = before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    goes_on = [reader.train_batch(whole_batch(step, reader)).item() for step in (2, 3)]
    return same, went_on, goes_on


def everywhere(own):
    """Returns the tensors of all pipeline ranks."""
    return {name: tensor for rank in everyone(own) for name, tensor in rank.items()}


def whole_batch(step, engine):
    """Yields the share of one of four data-parallel ranks of the micro-batches of two."""
    first = MICRO_BATCHES // 2 * engine.grid.data_parallel_id
    return iter([micro_batch(step, first + index) for index in range(MICRO_BATCHES // 2)])


def to_the_bit(case, places):
    """Returns whether reproducible runs at several stages and schedules end with the same weights."""
    ends = []
    for stage, block in places:
        settings = {"ds_lgamp": {**block, "reproducible": True}}
        engine = engine_of(case._replace(stage=stage, settings=settings))
        for step in range(3):
            engine.train_batch(batches(step, engine))
        ends.append(everywhere(whole(engine, lambda unit: unit.master.values)))
    return [all(torch.equal(end[name], ends[0][name]) for name in end) for end in ends]


def skipped(case):
    """Returns whether a step with an infinite gradient changed weights or state, the steps that were skipped, and the
    factor by which the loss scale changed."""
    engine = engine_of(case)
    engine.train_batch(batches(0, engine))
    before, scale = state_of(engine), engine.optimizer.loss_scale
    hook = next(iter(engine.optimizer.partition.units)).reduction

    def spoil():
        if hook.shard_gradient is not None:
            hook.shard_gradient[:1] = float("inf")
        return spoiled()

    spoiled = engine.lgamp.partition.finish_gradients
    engine.lgamp.partition.finish_gradients = spoil
    engine.train_batch(batches(1, engine))
    after = state_of(engine)
    same = all(torch.equal(before[key], after[key]) for key in before)
    return same, engine.skipped_steps, engine.optimizer.loss_scale / scale


def start():
    prepare_rank()
    # torch's CPU kernels compute in it; DeepSpeed says no.
    get_accelerator().is_fp16_supported = lambda: True


def run_all(cases):
    start()
    return [*(train(case) for case in cases), communicate_in_groups()]


def run_more(folder):
    start()
    lamb, muon = Case("Lamb", 1), Case("Muon", 1, Training(blocks=4, tied=True))
    places = [(0, {"schedule": "1f1b"}), (3, {"layers_per_chunk": 1}), (1, {"chunks_per_rank": 2})]
    return {
        "resumed": [resume(case, folder) for case in (lamb, muon)],
        "to the bit": [to_the_bit(case, places) for case in (lamb, Case("Muon", 1))],
        "skipped": [
            skipped(case._replace(settings=settings)) for case in (lamb, muon) for settings in (CHECKED, DYNAMIC)
        ],
    }


CASES = [
    Case("Lamb", 3, Training(blocks=4, clipping=0.1)),
    Case("Muon", 1),
    Case("torch's Muon", 2, Training(blocks=4, tied=True), scheduled=True),
    Case("FusedLamb", 0, Training(blocks=4, tied=True), {"bf16": {"enabled": True}}, scheduled=True),
    Case("Lamb", 2, Training(blocks=4, clipping=0.1), DYNAMIC),
    Case("Muon", 3, Training(blocks=4), DYNAMIC),
]


@pytest.fixture(scope="module")
def ranks():
    return run_on_ranks(4, run_all, CASES)


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: str(CASES[number][:2]))
def test_the_engine_steps_as_one_process_does(ranks, number):
    for results in ranks:
        assert results[number][0] < 1e-6


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: str(CASES[number][:2]))
def test_the_step_communicates_what_explain_predicts(ranks, number):
    for pipeline_rank in (ranks[:2], ranks[2:]):
        counted, predicted = zip(*(results[number][1:3] for results in pipeline_rank))
        assert len({*predicted}) == 1 and {calls for calls, _ in counted} == {predicted[0][0]}
        assert max(sent for _, sent in counted) == predicted[0][1]


def test_matrices_in_several_groups_communicate_what_explain_predicts(ranks):
    counted, predicted = zip(*(results[-1] for results in ranks))
    assert {*predicted} == {(2, max(sent for _, sent in counted))} and {calls for calls, _ in counted} == {2}


@pytest.mark.parametrize("number", [CASES.index(case) for case in CASES if "Muon" in case.optimizer])
def test_the_step_takes_the_memory_that_explain_predicts(ranks, number):
    for pipeline_rank in (ranks[:2], ranks[2:]):
        taken, predicted = zip(*(results[number][3:] for results in pipeline_rank))
        assert {*predicted} == {max(taken)}


@pytest.mark.slow
def test_the_engine_steps_other_optimizers_and_layouts_as_one_process_does():
    more = [
        Case("MuonWithAuxAdam", 3, Training(blocks=4, tied=True, clipping=0.2), scheduled=True),
        Case("own Muon", 0, settings={"bf16": {"enabled": True}}),
        Case("apex's FusedLAMB", 2),
        Case("Lamb", 1, Training(blocks=4, tied=True), {"bf16": {"enabled": True}}),
    ]
    for *results, _ in run_on_ranks(4, run_all, more):
        assert max(difference for difference, *_ in results) < 1e-6


@pytest.fixture(scope="module")
def more(tmp_path_factory):
    return run_on_ranks(4, run_more, str(tmp_path_factory.mktemp("checkpoints")))


@pytest.mark.slow
def test_a_checkpoint_goes_on_at_another_layout(more):
    for rank in more:
        for same, went_on, goes_on in rank["resumed"]:
            assert same
            assert goes_on == pytest.approx(went_on, rel=1e-4)


@pytest.mark.slow
def test_reproducible_runs_end_equal_to_the_bit(more):
    for rank in more:
        assert rank["to the bit"] == [[True] * 3] * 2


@pytest.mark.slow
def test_an_overflow_changes_neither_weights_nor_state(more):
    for rank in more:
        assert rank["skipped"] == [(True, 1, 1.0), (True, 1, 0.5)] * 2
