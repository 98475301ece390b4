"""Code shared by tests and benchmarks, and the runs of other projects' scripts. It is not published."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "testing" / "scripts"
"""Small training scripts that tests start on several ranks."""
