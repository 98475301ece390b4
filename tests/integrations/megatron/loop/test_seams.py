"""A Megatron-core with moved seams is refused with its version."""

import sys

import megatron.core
import pytest
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules

from ds_lgamp.cli.environment import inspect_environment
from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.megatron.loop.megatron_seams import (
    TESTED,
    check_seams,
    check_sharding_seams,
    check_training_seams,
    missing_seams,
)


def test_the_installed_version_has_every_seam():
    assert missing_seams() == inspect_environment().missing_megatron_seams == []
    check_seams()


def test_what_moved_is_named_with_the_version(monkeypatch):
    def other(**_options):
        """Has another interface."""

    monkeypatch.delattr(parallel_state, "set_virtual_pipeline_model_parallel_world_size")
    monkeypatch.setattr(schedules, "forward_step", other)
    lacks = (
        "megatron.core.parallel_state.set_virtual_pipeline_model_parallel_world_size, the parameters of forward_step"
    )
    with pytest.raises(ConfigError) as refusal:
        check_seams()
    assert str(refusal.value) == (
        f"megatron-core {megatron.core.__version__} lacks {lacks}; ds_lgamp is tested with {TESTED}; install one"
    )


def test_a_schedule_with_another_interface_is_a_seam_that_moved(monkeypatch):
    monkeypatch.setattr(schedules, "forward_backward_no_pipelining", lambda *, forward_step_func, more: None)
    assert missing_seams() == ["the parameters of forward_backward_no_pipelining"]


def test_stages_2_and_3_have_seams_of_their_own(monkeypatch):
    from megatron.core.optimizer import optimizer

    check_sharding_seams()
    monkeypatch.delattr(optimizer.Float16OptimizerWithFloat16Params, "_copy_main_params_to_model_params")
    check_seams()
    with pytest.raises(ConfigError, match="lacks Float16OptimizerWithFloat16Params._copy_main_params_to_model"):
        check_sharding_seams()


def test_without_megatron_it_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(ConfigError, match="megatron.core cannot be imported .*; install megatron-core==0.16.1"):
        check_seams()


def test_without_the_tree_it_is_said(monkeypatch):
    # Packages of releases from 0.17 on have it.
    monkeypatch.setitem(sys.modules, "megatron.training.training", None)
    with pytest.raises(
        ConfigError, match="megatron.training cannot be imported .*; run a script of Megatron-LM's tree, or install meg"
    ):
        check_training_seams()
