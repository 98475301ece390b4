import pytest
import torch
from torch import nn

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.deepspeed.model.shared_tensors import SharedBuffers


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(3))


def layers(*tables):
    return [nn.Sequential(nn.Linear(2, 2), table) for table in tables]


def change(table):
    table.table += 1


def replace(table):
    table.table = torch.ones(3)


@pytest.mark.parametrize("forward", [change, replace])
def test_a_shared_buffer_may_not_change(forward):
    table = Table()
    shared = SharedBuffers(layers(table, table))
    shared.look()
    shared.check()
    forward(table)
    with pytest.raises(ConfigError, match="several layers share the buffer 'table' of a Table, and a forward changes"):
        shared.check()


@pytest.mark.parametrize("changed", [0, 1])
def test_modules_that_shared_a_buffer_before_a_cast_may_not_change_it_either(changed):
    tables = [Table(), Table()]
    tables[1].table = tables[0].table
    shared = SharedBuffers(layers(*tables))
    for table in tables:
        table.bfloat16()
    shared.look()
    change(tables[changed])
    with pytest.raises(ConfigError, match="several layers share the buffer 'table'"):
        shared.check()


def test_a_table_may_grow():
    table = Table()
    shared = SharedBuffers(layers(table, table))
    shared.look()
    table.table = torch.zeros(4)
    shared.check()


def test_a_checkpoint_may_change_it_between_batches():
    table = Table()
    shared = SharedBuffers(layers(table, table))
    for _ in range(2):
        shared.look()
        shared.check()
        change(table)


@pytest.mark.parametrize("same_layer", [False, True])
def test_a_layer_may_change_a_buffer_of_its_own(same_layer):
    table = Table()
    (layer,) = layers(table)
    shared = SharedBuffers([layer, layer] if same_layer else [layer, *layers(Table())])
    shared.look()
    change(table)
    shared.check()
