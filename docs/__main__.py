"""Writes every generated block and plot of README.md and docs/: ``python -m docs``."""

import argparse

from docs.pages import write

if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m docs", description=__doc__).parse_args()
    write()
