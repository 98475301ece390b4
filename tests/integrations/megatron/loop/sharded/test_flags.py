"""Flags of Megatron-LM beside stages 2 and 3: what the program does anyway, and what is refused in one sentence."""

import argparse
import re
import sys
from argparse import Namespace

import pytest

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.megatron.loop.flags import (
    IMPLIED,
    REFUSED_BESIDE_SHARDING,
    option_of,
    prepare_sharding,
    refuse_beside_sharding,
)
from testing import ROOT
from testing.pretraining import megatron_tree
from testing.ranks import run_on_ranks
from tests.integrations.megatron.loop.known_flags import HONOURED
from tests.integrations.megatron.training_loop import prepare_process


@pytest.mark.parametrize("flag", REFUSED_BESIDE_SHARDING, ids=lambda flag: flag.name)
def test_refusals_name_flag_value_and_fix(flag):
    argument = argument_of(flag)
    with pytest.raises(ConfigError) as refusal:
        refuse_beside_sharding(Namespace(**{argument: 987}), arguments=True)
    assert str(refusal.value) == f"{option_of(argument)} is 987 beside zero_optimization.stage 2 or 3: {flag.note}"
    assert re.search("; (remove it|use|give|set) ?", flag.note)
    with pytest.raises(ConfigError, match=f"^{flag.name} is 987 beside "):
        refuse_beside_sharding(Namespace(**{flag.name: 987}))
    for value in flag.harmless:
        refuse_beside_sharding(Namespace(**{flag.name: value}))


def argument_of(flag):
    return flag.argument or flag.name


def test_flags_for_what_the_program_does_anyway_may_be_given():
    args = Namespace(**dict.fromkeys(IMPLIED, True))
    prepare_sharding(args)
    assert vars(args) == dict.fromkeys(IMPLIED, False)
    assert set(IMPLIED) <= set(HONOURED)


def test_the_page_lists_what_is_refused():
    page = (ROOT / "docs" / "megatron.md").read_text()
    (listed,) = re.findall("refused at stages 2 and 3, .*?: (.*?)\n\n", page, re.DOTALL)
    refused = {option_of(argument_of(flag)) for flag in REFUSED_BESIDE_SHARDING}
    assert set(re.findall("`(--[a-z0-9-]+)`", listed)) == refused


LATER = {"ddp_param_name_patterns_for_fp32_local_accumulation", "save_params_interval", "mtp_detach_heads"}
"""Flags that release 0.16 has not."""


def test_megatron_lm_has_every_flag_that_is_refused():
    run_on_ranks(1, look_for_options, str(megatron_tree()), before_init=prepare_process)


def look_for_options(tree):
    sys.path.insert(0, tree)
    from megatron.training import arguments

    actions = arguments.add_megatron_arguments(argparse.ArgumentParser(add_help=False))._actions
    known = {action.dest for action in actions}
    assert {*map(argument_of, REFUSED_BESIDE_SHARDING), *IMPLIED} - known - LATER == set()
