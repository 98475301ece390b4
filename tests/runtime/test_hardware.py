"""What Linux shows of a node."""

import pytest

from ds_lgamp.runtime.hardware import interface_of, network_kind, own_interface


@pytest.mark.parametrize(
    ("ports", "kind"),
    [
        ([], "ethernet"),
        ([("InfiniBand", "4: ACTIVE")], "infiniband"),
        ([("Ethernet", "4: ACTIVE")], "roce"),
        ([("Ethernet", "4: ACTIVE"), ("InfiniBand", "4: ACTIVE")], "infiniband"),
        ([("Ethernet", "4: ACTIVE"), ("InfiniBand", "1: DOWN")], "roce"),
        ([("InfiniBand", "1: DOWN")], "ethernet"),
    ],
)
def test_the_fastest_active_port_is_the_kind_of_network(tmp_path, ports, kind):
    for number, (layer, state) in enumerate(ports):
        port = tmp_path / "infiniband" / f"mlx5_{number}" / "ports" / "1"
        port.mkdir(parents=True)
        (port / "link_layer").write_text(f"{layer}\n")
        (port / "state").write_text(f"{state}\n")
    assert network_kind(tmp_path) == kind


def test_loopback_is_no_interface_to_others():
    assert interface_of("127.0.0.1") is None and own_interface("127.0.0.1", 29500) is None


def test_an_address_of_nobody_has_no_interface():
    assert interface_of("203.0.113.7") is None
