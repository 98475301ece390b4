"""What the processes of a job must have in common."""

import torch

from ds_lgamp.integrations.handshake import process_terms


def test_a_device_without_nccl_has_no_version_of_it(monkeypatch):
    """As Megatron-LM's loop on the CPU, which is told that there is a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert "the version of torch" in process_terms()
    assert "the version of NCCL" not in process_terms()
