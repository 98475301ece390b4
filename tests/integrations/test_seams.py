"""The tables of seams that are not checked at run time: the names that functions of the installed hosts look up."""

import inspect
from collections.abc import Iterable, Iterator
from types import CodeType

import deepspeed
from deepspeed.runtime.pipe.module import PipelineModule

from ds_lgamp.integrations.deepspeed.hook.deepspeed_seams import LOOKUPS
from ds_lgamp.integrations.hosts import resolve
from testing.pretraining import megatron_tree

ATTRIBUTES = {
    "deepspeed.runtime.dataloader.RepeatingLoader": ("data_iter", "loader"),
    "deepspeed.runtime.pipe.engine.PipelineEngine": (
        *("_compute_loss", "agg_additional_losses", "data_iterator", "data_parallel_group", "device", "dp_group_loss"),
        *("dp_world_size", "eval_return_logits", "fwd_outputs", "global_samples", "global_steps", "grid"),
        *("lr_scheduler", "micro_batches", "micro_steps", "monitor", "outputs", "skipped_steps", "stage_id", "timers"),
        *("total_additional_losses", "total_loss", "training_data"),
    ),
    "deepspeed.runtime.pipe.module.PipelineModule": (
        *("_grid", "_layer_specs", "_local_start", "_local_stop", "_num_layers", "base_seed", "dynamic_shape"),
        *("forward_funcs", "fwd_map", "local_rank", "loss_fn", "micro_offset", "num_stages", "parts", "seed_fn"),
        *("seed_layers", "stage_id", "tied_comms", "tied_modules", "tied_weight_attrs", "world_group"),
    ),
    "deepspeed.runtime.pipe.topology.PipelineParallelGrid": ("dp_groups", "pipe_groups"),
    "deepspeed.runtime.zero.partition_parameters.GatheredParameters": (
        *("all_gather", "ds_id", "ds_process_group", "partition"),
    ),
}
"""The attributes that the methods of each class of DeepSpeed must set or use on their instances."""
TRAINING_LOOKUPS = {
    "megatron.training.checkpointing.load_checkpoint": ("_load_base_checkpoint",),
    "megatron.training.training.dummy_train_step": ("get_num_microbatches", "get_rerun_state_machine"),
    "megatron.training.training.evaluate": ("get_forward_backward_func",),
    "megatron.training.training.evaluate_and_print_results": ("evaluate",),
    "megatron.training.training.save_checkpoint_and_time": ("save_checkpoint",),
    "megatron.training.training.setup_model_and_optimizer": ("get_megatron_optimizer", "get_model", "load_checkpoint"),
    "megatron.training.training.train": (
        *("calc_params_l2_norm", "curr_iteration", "dummy_train_step", "get_forward_backward_func", "grad_sync_func"),
        *("no_sync_func", "param_sync_func"),
    ),
}
"""The names that each function of Megatron-LM must look up when it is called: ``install_training`` replaces the
functions, and the executor takes the work of the hooks. A trace takes the number of the step."""
VALIDATING = ("megatron.training.initialize.initialize_megatron", "megatron.training.arguments.parse_and_validate_args")
"""The function that looks up ``validate_args``: up to 0.17, and from 0.18 on."""


def names_in(code: CodeType) -> Iterator[str]:
    """Yields every global and attribute that a function and its inner functions mention."""
    yield from code.co_names
    for inner in code_inside(code):
        yield from names_in(inner)


def code_inside(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def names_in_methods(owner: type) -> set[str]:
    """Returns every attribute that the methods of a class and of its bases in DeepSpeed mention."""
    members = [
        member.fget if isinstance(member, property) else member
        for base in inspect.getmro(owner)
        if base.__module__.startswith("deepspeed")
        for member in vars(base).values()
    ]
    codes = [getattr(inspect.unwrap(member), "__code__", None) for member in members if callable(member)]
    return {name for code in codes if code is not None for name in code.co_names}


def lookups_missing_in_initialize() -> list[str]:
    return missing(LOOKUPS, names_in(inspect.unwrap(deepspeed.initialize).__code__))


def missing_attributes() -> list[str]:
    return [f"{path}.{name}" for path, names in ATTRIBUTES.items() for name in missing(names, methods_at(path))]


def methods_at(path: str) -> set[str]:
    return names_in_methods(resolve(path))


def missing(wanted: Iterable[str], found: Iterable[str]) -> list[str]:
    known = set(found)
    return [name for name in wanted if name not in known]


def test_initialize_looks_up_what_install_replaces():
    assert lookups_missing_in_initialize() == []


def test_a_deepspeed_whose_initialize_looks_up_other_names_is_noticed(monkeypatch):
    monkeypatch.setattr(deepspeed, "initialize", lambda: deepspeed.PipelineEngine)
    assert lookups_missing_in_initialize() == [name for name in LOOKUPS if name != "PipelineEngine"]


def test_the_methods_of_deepspeed_set_or_use_every_attribute():
    assert missing_attributes() == []


def test_a_deepspeed_whose_methods_no_longer_set_an_attribute_is_noticed(monkeypatch):
    for name, member in list(vars(PipelineModule).items()):
        # Unwraps the constructor, because another test may have installed the hook that wraps it.
        if "tied_comms" in getattr(getattr(inspect.unwrap(member), "__code__", None), "co_names", ()):
            monkeypatch.setattr(PipelineModule, name, lambda self: None)
    assert "deepspeed.runtime.pipe.module.PipelineModule.tied_comms" in missing_attributes()


def test_the_functions_of_megatron_lm_look_up_what_install_replaces():
    """Reads the sources, because Megatron-LM's training loop cannot be imported on a machine without CUDA."""
    assert [
        f"{path}: {name}" for path, names in TRAINING_LOOKUPS.items() for name in missing(names, looked_up(path))
    ] == []
    assert any("validate_args" in looked_up(path) for path in VALIDATING)


def looked_up(path: str) -> set[str]:
    """Returns the names that a function of the tree looks up; none if the tree has no such function."""
    module, _, function = path.rpartition(".")
    file = megatron_tree() / (module.replace(".", "/") + ".py")
    functions = {code.co_name: code for code in code_inside(compile(file.read_text(), str(file), "exec"))}
    return set(names_in(functions[function])) if function in functions else set()
