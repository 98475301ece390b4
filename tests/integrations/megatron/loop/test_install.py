"""``get_forward_backward_func`` returns the block's schedule, and Megatron-core's own where the block has none."""

import pytest
from megatron.core import process_groups_config
from megatron.core.pipeline_parallel import schedules

from ds_lgamp.config import LgampConfig
from ds_lgamp.integrations.megatron.loop.arguments import Job
from ds_lgamp.integrations.megatron.loop.forward_backward import ForwardBackward
from ds_lgamp.integrations.megatron.loop.install import install_schedules, uninstall


class SeveralGrids:
    """Stands for the process groups of a model whose modules have grids of their own."""


@pytest.fixture
def installed(monkeypatch):
    """``get_forward_backward_func`` of a host that also takes such models, with the block installed."""
    if hasattr(schedules, "register_forward_backward_func"):
        pytest.skip("a patched Megatron-core asks the selector itself; see tests/patched_hosts.py")

    def get_forward_backward_func(pp_size=None, vp_size=None, schedule_pg_collection=None):
        return "Megatron-core's schedule"

    name = "MultiModuleProcessGroupCollection"
    monkeypatch.setattr(process_groups_config, name, SeveralGrids, raising=False)
    monkeypatch.setattr(schedules, "get_forward_backward_func", get_forward_backward_func)
    install_schedules(Job(LgampConfig(), 0, {}))
    yield schedules.get_forward_backward_func
    uninstall()
    assert schedules.get_forward_backward_func is get_forward_backward_func


def test_the_block_runs_every_pipeline(installed):
    chosen = installed()
    assert isinstance(chosen, ForwardBackward)
    assert installed(1, 2) is installed(pp_size=4, vp_size=None) is installed(schedule_pg_collection=None) is chosen


def test_the_block_declines_a_model_of_several_modules_on_grids_of_their_own(installed):
    assert installed(schedule_pg_collection=SeveralGrids()) == "Megatron-core's schedule"
    assert installed(None, None, SeveralGrids()) == "Megatron-core's schedule"
