"""DeepSpeed's own tests of pipelines, with a block in the configuration of every PipelineModule they initialise."""

import json
import sys
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from testing.in_host import BLOCK
from testing.launching import run
from testing.public.deepspeed_scripts import host_environment
from testing.public.outcome import Case

PIPE, MODULE, CHECKPOINT = "runtime/pipe", "pipe/test_pipe_module.py", "checkpoint/test_pipeline.py"
MOST_RANKS = 4
BLOCKS = {"layers_per_chunk": 2, "placement": "modular"}


def cases(tree: Path, folder: Path) -> Iterable[Case]:
    """All tests of pipelines without a block and at two stages, and those that compare checkpoints at stages 1 and 2
    too."""
    yield Case(f"unit/{PIPE}, no block", partial(passed, tree, [PIPE], {}))
    for stage in (0, 3):
        yield Case(f"unit/{PIPE}, ZeRO-{stage}", partial(passed, tree, [PIPE], with_stage(stage)))
    yield Case(f"unit/{MODULE}, no block", partial(passed, tree, [MODULE], {}))
    yield Case(f"unit/{MODULE}, ZeRO-3", partial(passed, tree, [MODULE], with_stage(3)))
    yield Case(f"unit/{CHECKPOINT}, no block", partial(passed, tree, [CHECKPOINT], {}))
    for stage in (1, 3):
        yield Case(f"unit/{CHECKPOINT}, ZeRO-{stage}", partial(passed, tree, [CHECKPOINT], with_stage(stage)))


def with_stage(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}, "ds_lgamp": BLOCKS}


def passed(tree: Path, tests: list[str], added: dict[str, Any], seconds: float = 900) -> str:
    """How many of ``tests`` pass with ``added`` in their configurations."""
    with tempfile.TemporaryDirectory() as folder:
        # Its conftest would put a DeepSpeed beside it ahead of the installed one.
        (Path(folder) / "tests").symlink_to((tree / "tests").resolve())
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml", f"{folder}/results.xml"]
        words += [f"unit/{name}" for name in tests]
        variables = {BLOCK: json.dumps(added)} if added else {}
        environment = host_environment(MOST_RANKS, TMPDIR=folder, **variables)
        try:
            run(words, seconds, environment, Path(folder) / "tests")
        except AssertionError:
            # Tests that fail are in the results, unless there are none.
            if not Path(folder, "results.xml").exists():
                raise
        return counted(Path(folder, "results.xml").read_text())


def counted(report: str) -> str:
    """The result that pytest's ``report`` in JUnit's format tells."""
    (suite,) = ElementTree.fromstring(report).iter("testsuite")
    total, skipped, broken = (int(suite.get(name, 0)) for name in ("tests", "skipped", "failures"))
    broken += int(suite.get("errors", 0))
    total -= skipped
    if broken or not total:
        names = [
            case.get("name", "")
            for case in suite.iter("testcase")
            if {part.tag for part in case} & {"failure", "error"}
        ]
        return f"failed: {broken} of {total}, {', '.join(names)}"
    return f"passed {total} of {total}" + (f", {skipped} skipped" if skipped else "")
