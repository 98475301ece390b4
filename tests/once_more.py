"""``pytest --once-more``: a test that fails is run once more by itself, and only then makes the run red.

On a busy machine a test may fail for want of time. So each test that failed runs again when all others are over, in a
process of its own. If it passes then, the closing line counts it as passed, and as rerun. Either way a section says
what failed first and what became of it.
"""

import subprocess
import sys
from typing import NamedTuple

import pytest

MOST = 20
"""If more tests fail, something is broken."""
SECONDS = 1800
"""The time limit of one test."""


class Again(NamedTuple):
    """A test that has failed and was run once more."""

    first: pytest.TestReport
    passed: bool
    output: str
    """What its own run wrote."""


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--once-more", action="store_true", help="run tests that failed once more, each by itself")


def begin(config: pytest.Config) -> None:
    """Does as the option says. Processes that run a part of the tests leave that to the one that started them."""
    if config.getoption("--once-more") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(OnceMore(config))


class OnceMore:
    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.again: list[Again] = []

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Runs what failed, and tells the reporter and the exit status how that went."""
        stats = self.config.pluginmanager.get_plugin("terminalreporter").stats
        failed = [*stats.get("failed", ()), *stats.get("error", ())]
        first = {report.nodeid: report for report in reversed(failed) if isinstance(report, pytest.TestReport)}
        if not first or len(first) > MOST:
            return
        self.again = [Again(report, *self._run(report.nodeid)) for report in reversed(first.values())]
        passed = {each.first.nodeid for each in self.again if each.passed}
        for kind in ("failed", "error"):
            stats[kind] = [report for report in stats.get(kind, ()) if report.nodeid not in passed]
        stats.setdefault("passed", []).extend(each.first for each in self.again if each.passed)
        stats["rerun"] = [each.first for each in self.again]
        if session.exitstatus == pytest.ExitCode.TESTS_FAILED and not stats["failed"] and not stats["error"]:
            session.exitstatus = pytest.ExitCode.OK

    def _run(self, test: str) -> tuple[bool, str]:
        """Runs one test. Returns whether it passed, and what that wrote."""
        words = [sys.executable, "-m", "pytest", test, "-p", "no:cacheprovider", "-m", self.config.option.markexpr]
        words += ["--patched"] if self.config.getoption("--patched", False) else []
        # An example that hypothesis stored is tried again with the profile that drew it only.
        profile = self.config.getoption("--hypothesis-profile", None)
        words += ["--hypothesis-profile", profile] if profile else []
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
        try:
            ended = subprocess.run(words, cwd=self.config.rootpath, timeout=SECONDS, **options)
        except subprocess.TimeoutExpired as hung:
            return False, f"it does not end within {SECONDS} seconds:\n{hung.stdout}"
        return ended.returncode == 0, ended.stdout

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.again:
            return
        terminalreporter.section("failed, and run once more by itself")
        for first, passed, output in self.again:
            terminalreporter.write_line(f"\n{first.nodeid} failed, then {'passed' if passed else 'failed again'}")
            terminalreporter.write_line(first.longreprtext if passed else output)
        for first, passed, _ in self.again:
            terminalreporter.write_line(f"{'PASSED' if passed else 'FAILED'} when run once more: {first.nodeid}")
