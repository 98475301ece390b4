"""What install changes and what it leaves alone, and how layers move."""

import random
import sys

import numpy
import pytest
import torch
import torch.distributed as dist

import ds_lgamp
from ds_lgamp.config import ConfigError
from testing.deepspeed_rank import prepare_rank, quiet
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.models import Training, build_layers
from tests.integrations.deepspeed.running import Layout, gathered, initialize, train

STOCK = Layout(pipeline_ranks=2, data_ranks=1, stage=1, block=None)


def stock_before_and_after():
    prepare_rank()
    training = Training(tied=True, tuples=False, momentum=0.9, decay=0.01, clipping=0.3, warmup=2)
    real_install, ds_lgamp.install = ds_lgamp.install, lambda: None
    plain = train(training, STOCK)
    ds_lgamp.install = real_install
    installed = train(training, STOCK)
    disabled = train(training, STOCK._replace(block={"enabled": False, "schedule": "gpipe"}))
    return [(type(run.engine).__name__, run.losses, run.norms, run.evaluation) for run in (plain, installed, disabled)]


def test_without_an_enabled_block_deepspeed_is_stock_to_the_bit():
    for plain, installed, disabled in run_on_ranks(2, stock_before_and_after):
        assert plain[0] == "PipelineEngine"
        assert plain == installed == disabled


def attributes_of(host):
    """Returns every attribute of every module of ``host`` and of its classes, without Python's records of warnings."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == host and module is not None:
            for key, value in vars(module).items():
                if key != "__warningregistry__":
                    found[name, key] = value
                if isinstance(value, type) and value.__module__.startswith(host):
                    found.update(((name, key, member), thing) for member, thing in vars(value).items())
    return found


def compare_attributes():
    import deepspeed

    import ds_lgamp.integrations.deepspeed.hook.initialize  # noqa: F401
    from ds_lgamp.integrations.deepspeed.hook.deepspeed_seams import check_seams
    from ds_lgamp.integrations.deepspeed.hook.notice import notice_nothing

    # Imports parts of deepspeed first, because these imports do not count as a trace.
    check_seams()
    # Where torch calls ds_lgamp, the import of deepspeed is no stock one.
    notice_nothing()
    before = attributes_of("deepspeed")
    ds_lgamp.install()
    ds_lgamp.install()
    during = attributes_of("deepspeed")
    ds_lgamp.uninstall()
    after = attributes_of("deepspeed")
    return hasattr(deepspeed, "register_engine_factory"), differences(before, during), differences(before, after)


def differences(before, after):
    return {key for key in before.keys() | after.keys() if before.get(key) is not after.get(key)}


READER = ("deepspeed.utils.zero_to_fp32", "_get_fp32_state_dict_from_zero_checkpoint")
"""What reads checkpoints into fp32 weights. No patch makes it ask others."""


def test_uninstall_leaves_no_trace():
    ((has_registry, changed, left),) = run_on_ranks(1, compare_attributes)
    assert READER in changed
    assert changed == {READER} if has_registry else ("deepspeed", "PipelineEngine") in changed
    assert left == set()


def changes_to_the_engine_class():
    """Changes to deepspeed.PipelineEngine by user code reach both engines. With a block, another class in its place is
    refused."""
    prepare_rank()
    import deepspeed

    ds_lgamp.install()
    stock_method = deepspeed.PipelineEngine.set_batch_fn
    deepspeed.PipelineEngine.set_batch_fn = lambda self, _: "changed"
    engines = [
        initialize(Training(), STOCK._replace(stage=stage, block=block)) for stage, block in ((1, None), (3, {}))
    ]
    answers = [engine.set_batch_fn(None) for engine in engines]
    deepspeed.PipelineEngine.set_batch_fn = stock_method
    assert isinstance(engines[1], deepspeed.DeepSpeedEngine)

    class Own(deepspeed.PipelineEngine):
        """A user's engine."""

    deepspeed.PipelineEngine = Own
    with pytest.raises(ConfigError) as refused:
        initialize(Training(), STOCK._replace(stage=3, block={}))
    return answers, str(refused.value), type(initialize(Training(), STOCK)).__name__


def test_changes_to_the_engine_class_are_heeded():
    for answers, refusal, stock in run_on_ranks(2, changes_to_the_engine_class):
        assert answers == ["changed", "changed"]
        assert refusal.startswith("deepspeed.PipelineEngine was replaced by Own after ds_lgamp.install()")
        assert stock == "Own"


def engine_is_what_user_code_expects():
    prepare_rank()
    import deepspeed

    engine = initialize(Training(), STOCK._replace(stage=3, block={}))
    stock = initialize(Training(), STOCK)
    return [isinstance(made, deepspeed.PipelineEngine) for made in (engine, stock)]


def test_user_code_may_ask_whether_the_engine_is_a_pipeline_engine():
    assert run_on_ranks(2, engine_is_what_user_code_expects) == [[True, True]] * 2


def states():
    return torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()


def move_layers():
    """Returns the weights that a user loaded, by name, after the layers have moved, and whether random numbers were
    drawn."""
    prepare_rank()
    training = Training(blocks=9, tied=True)
    torch.manual_seed(3)
    layout = STOCK._replace(stage=3, block={"layers_per_chunk": 1}, optimizer="json")
    import tests.integrations.deepspeed.running as running

    real = running.pipeline_module
    drawn = {}

    def module_with_frozen_bias(*arguments, **options):
        module = real(*arguments, **options)
        for name, parameter in module.named_parameters():
            if name.endswith("norm.bias"):
                parameter.requires_grad_(False)
        random.seed(4)
        numpy.random.seed(4)
        drawn["before"] = states()
        return module

    running.pipeline_module = module_with_frozen_bias
    ds_lgamp.install()
    engine = initialize(training, layout)
    drawn["after"] = states()
    frozen = {name for name, parameter in engine.module.named_parameters() if not parameter.requires_grad}
    weights = gathered(engine.optimizer.partition, lambda unit: unit.storage.shard)
    return drawn["before"] == drawn["after"], weights, frozen


def test_layers_move_with_their_values_and_draw_no_random_numbers():
    _, expected = build_layers(Training(blocks=9, tied=True))
    moved = run_on_ranks(4, move_layers)
    names = set()
    for untouched, weights, frozen in moved:
        assert untouched
        assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())
        assert {name for name in weights if name.endswith("norm.bias")} == frozen
        names |= set(weights)
    assert names == set(expected)


def modules_by_rank():
    prepare_rank()
    engine = initialize(Training(blocks=8), Layout(2, 1, 0, {}))
    with quiet():
        layout = engine.module.layout
    return sorted(name for name, _ in engine.module.named_children()), [layout.owner(layer) for layer in range(12)]


def test_chunk_c_lives_on_pipeline_rank_c_mod_p():
    first, second = run_on_ranks(2, modules_by_rank)
    assert first[1] == [0, 0, 0, 1, 0, 1, 0, 1, 0, 1, 1, 1]
    assert {"0", "1", "4", "6", "8"} <= set(first[0]) and {"3", "5", "7", "9", "11"} <= set(second[0])
    assert not set(first[0]) & set(second[0]) - {"tied_modules"}


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"block": {"schedule": "interleaved_1f1b", "layers_per_chunk": 5}}, "multiple of 2"),
        ({"block": {"chunks_per_rank": 7}}, "ds_lgamp.chunks_per_rank is 7"),
        ({"block": {"resident_chunk": 1}}, "did you mean resident_chunks"),
    ],
)
def test_impossible_settings_are_refused_on_every_rank(layout, message):
    for refusal in run_on_ranks(2, refused, STOCK._replace(**layout)):
        assert message in refusal and "\n" not in refusal


def refused(layout):
    prepare_rank()
    with pytest.raises(ConfigError) as error:
        initialize(Training(), layout)
    dist.barrier()
    return str(error.value)
