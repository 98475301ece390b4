"""What the processes of a job must have in common."""

import sys
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from ds_lgamp.partition.agreement import (
    Term,
    anyone,
    code_of,
    process_terms,
    raise_everywhere,
    refuse_differing_terms,
)
from testing.ranks import run_on_ranks

RANKS = 3


def ask(exchanged):
    """What a rank learns from the others, and how often it exchanged objects with them in order to."""
    with pytest.MonkeyPatch.context() as patch:
        gather = dist.all_gather_object
        patch.setattr(dist, "all_gather_object", lambda *given, **named: exchanged.append(1) or gather(*given, **named))
        rank = dist.get_rank()
        yield anyone(rank == 1), anyone(False)
        for alike in (True, False):
            term = Term("big" if alike or rank < 2 else "small", "use one")
            yield error_of(refuse_differing_terms, {"the size": term}, ValueError)
        yield error_of(raise_everywhere, None, KeyError)
        yield error_of(raise_everywhere, f"rank {rank} is late" if rank else None, KeyError)


def error_of(function, *arguments):
    try:
        function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error.args[0]}"
    return None


def answers():
    exchanged = []
    return [(answer, len(exchanged)) for answer in ask(exchanged)]


def test_ranks_exchange_objects_only_where_one_of_them_has_something_to_say():
    differ = "ValueError: the size is big on ranks 0 and 1 and small on rank 2; use one"
    assert (
        run_on_ranks(RANKS, answers)
        == [[((True, False), 0), (None, 0), (differ, 1), (None, 1), ("KeyError: rank 1 is late", 2)]] * RANKS
    )


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
