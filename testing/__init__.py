"""What tests and benchmarks share, and what runs other projects' scripts; not shipped."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "testing" / "scripts"
"""Small training scripts that ranks of tests run."""
