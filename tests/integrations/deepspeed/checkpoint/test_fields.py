"""The names in state.json belong to the file format and do not follow the engine's field names."""

from types import SimpleNamespace

from ds_lgamp.checkpoint.state import Counters, State
from ds_lgamp.integrations.deepspeed.checkpoint.fields import COUNTERS, PULLED, TOP_LEVEL, read_fields, write_fields


def test_the_counters_are_those_of_the_file_format():
    in_format = {field.alias or name for name, field in Counters.model_fields.items()}
    assert {*COUNTERS, PULLED} == in_format
    assert set(TOP_LEVEL) < set(State.model_fields)


def test_a_renamed_engine_field_changes_no_name_in_the_file():
    engine = SimpleNamespace(steps_taken=3, part=SimpleNamespace(offset=8))
    table = {"global_steps": "steps_taken", "micro_offset": "part.offset"}
    assert read_fields(engine, table) == {"global_steps": 3, "micro_offset": 8}
    write_fields(engine, table, {"global_steps": 5, "micro_offset": 9, "other": 1})
    assert engine.steps_taken == 5 and engine.part.offset == 9
