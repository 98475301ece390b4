"""The slow tests are divided into parts."""

import pytest

from testing import ROOT
from tests.slow import FIRST_GPU, Part, in_part, read_part


def test_every_file_is_in_one_part_and_the_dry_run_for_a_first_gpu_in_each():
    files = {path.relative_to(ROOT) for path in ROOT.glob("tests/**/test_*.py")}
    parts = [[file for file in files if in_part(file, Part(number, 8))] for number in range(8)]
    assert FIRST_GPU in files and all(FIRST_GPU in part and len(part) > 1 for part in parts)
    assert sorted(file for part in parts for file in part if file != FIRST_GPU) == sorted(files - {FIRST_GPU})


@pytest.mark.parametrize("text", ["8/8", "3", "-1/8", "a/b", "0/0"])
def test_a_part_that_does_not_exist_is_refused(text):
    assert read_part("7/8") == Part(7, 8)
    with pytest.raises(pytest.UsageError, match=f"--part is {text}; give a number from 0"):
        read_part(text)
