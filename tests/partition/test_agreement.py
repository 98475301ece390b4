"""What the processes of a job must have in common."""

import sys
from types import ModuleType

import torch

from ds_lgamp.partition.agreement import code_of, process_terms


def test_a_device_without_nccl_has_no_version_of_it(monkeypatch):
    """As Megatron-LM's loop on the CPU, which is told that there is a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert "the version of torch" in process_terms()
    assert "the version of NCCL" not in process_terms()


def test_the_code_of_a_class_is_its_name_and_all_its_file(tmp_path, monkeypatch):
    def imported(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        module = ModuleType(name)
        module.__file__ = str(tmp_path / f"{name}.py")
        monkeypatch.setitem(sys.modules, name, module)
        exec(text, vars(module))
        return module

    one, same = (imported(name, "class A: pass\nclass B: pass\n") for name in ("one", "same"))
    other = imported("other", "class A: pass\nclass B: x = 1\n")
    assert code_of(one.A) == code_of(same.A) != code_of(other.A)
    assert code_of(one.A) != code_of(one.B)
