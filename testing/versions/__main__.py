"""Makes an environment for every combination of versions and runs the default tests in each. Prints a table and writes
a record. Exits with 1 if a test fails.

Words after ``--`` go to pytest: ``python -m testing.versions --pythons 3.12 --torch 2.11 -- tests/schedule``.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

from docs.versions import pinned_versions
from testing.launching import ROOT
from testing.public.outcome import commit_of
from testing.versions.environments import Versions, environment
from testing.versions.record import DEFAULT_SET, PYTHONS, RECORDED, TORCHES, TestRun, add, markdown

_INSTALLED = """
import json, platform
from importlib.metadata import version
print(json.dumps([platform.python_version(), *map(version, ("torch", "deepspeed", "megatron-core", "transformers"))]))
"""


def main(words: Sequence[str] | None = None) -> int:
    """Runs the tests with the versions that ``words`` name. Returns 1 if a test fails, else 0."""
    options, tests = parse(sys.argv[1:] if words is None else words)
    others = tuple(options.packages)
    chosen = [
        Versions(python, torch, options.deepspeed, others) for torch in options.torch for python in options.pythons
    ]
    runs: list[TestRun] = []
    try:
        for versions in chosen:
            python = environment(versions, options.folder, os.environ.get("TORCH_INDEX_URL"))
            if not options.prepare:
                runs.append(run_tests(python, tests, python.parents[1]))
                print(f"{versions.name}: {runs[-1]}", file=sys.stderr, flush=True)
    finally:
        # Not before, because tests compare the record with the page that is made of it.
        for run in runs:
            add(run, options.json)
    print(markdown(runs))
    return int(any(run.failed for run in runs))


def parse(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the options, and the arguments of pytest."""
    parser = argparse.ArgumentParser(
        prog="python -m testing.versions", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pythons", nargs="+", default=PYTHONS, metavar="VERSION", help="default: %(default)s")
    parser.add_argument("--torch", nargs="+", default=TORCHES, metavar="VERSION", help="default: %(default)s")
    pinned = pinned_versions()["deepspeed"]
    parser.add_argument("--deepspeed", default=pinned, metavar="VERSION", help="default: the pinned %(default)s")
    parser.add_argument(
        "--packages",
        nargs="+",
        default=[],
        metavar="NAME==VERSION",
        help="versions of other packages that are not the pinned ones, such as transformers==5.24.0",
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "versions", help="holds the environments")
    parser.add_argument("--json", type=Path, default=RECORDED, help="the record (default: %(default)s)")
    parser.add_argument("--prepare", action="store_true", help="make the environments, run no tests")
    own = list(words)
    tests = own[own.index("--") + 1 :] if "--" in own else []
    options = parser.parse_args(own[: own.index("--")] if "--" in own else own)
    options.folder, options.json = options.folder.resolve(), options.json.resolve()
    return options, tests


def run_tests(python: Path, tests: Sequence[str], folder: Path) -> TestRun:
    """Runs tests, and those that fail once more by themselves, because a busy machine lets tests run out of time.

    Args:
        tests: the arguments of pytest; the default set if there are none.
        folder: for reports and pytest's cache.
    """
    start = time.monotonic()
    passed, skipped, failed = pytest(python, [*tests, "--numprocesses", "2", "--dist", "loadfile"], folder)
    failed_again = pytest(python, [*tests, "--last-failed"], folder)[2] if failed else []
    installed = subprocess.run([python, "-c", _INSTALLED], capture_output=True, text=True, check=True)
    return TestRun(
        *json.loads(installed.stdout),
        tests=shlex.join(tests) or DEFAULT_SET,
        passed=passed + len(failed) - len(failed_again),
        skipped=skipped,
        failed=failed_again,
        passed_alone=[name for name in failed if name not in failed_again],
        seconds=round(time.monotonic() - start, 1),
        date=date.today().isoformat(),
        commit=commit_of(ROOT),
    )


def pytest(python: Path, words: Sequence[str], folder: Path) -> tuple[int, int, list[str]]:
    """Returns the number of tests that passed and that were skipped, and the names of those that failed."""
    report, path = folder / "report.xml", f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    command = [python, "-m", "pytest", "--quiet", f"--junitxml={report}", "-o", f"cache_dir={folder / 'cache'}", *words]
    with (folder / "output.txt").open("a") as output:
        subprocess.run(
            command, cwd=ROOT, env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}, stdout=output, stderr=output
        )
    return outcomes(ElementTree.parse(report))


def outcomes(report: ElementTree.ElementTree) -> tuple[int, int, list[str]]:
    """Counts the tests of a report of pytest in the JUnit format."""
    passed, skipped, failed = 0, 0, []
    for case in report.iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failed.append(f"{case.get('classname')}.{case.get('name')}")
        elif "skipped" in kinds:
            skipped += 1
        else:
            passed += 1
    return passed, skipped, failed


if __name__ == "__main__":
    sys.exit(main())
