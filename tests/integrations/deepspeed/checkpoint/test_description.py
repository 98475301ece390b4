"""The names in state.json belong to the file format."""

from ds_lgamp.checkpoint.schema import Counters
from ds_lgamp.integrations.deepspeed.checkpoint.description import COUNTERS, PULLED


def test_the_counters_are_those_of_the_file_format():
    in_format = {field.alias or name for name, field in Counters.model_fields.items()}
    assert {*COUNTERS, PULLED} == in_format
