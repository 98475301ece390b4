"""Prints the folder in which the running interpreter has torch. Exits with 1 if it has no torch 2.6 or newer."""

import importlib.metadata
import sys

try:
    distribution = importlib.metadata.distribution("torch")
except importlib.metadata.PackageNotFoundError:
    sys.exit(1)
if tuple(map(int, distribution.version.split(".")[:2])) < (2, 6):
    sys.exit(1)
print(distribution.locate_file(""))
