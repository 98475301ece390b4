"""Disturbs training jobs at random, and judges how they end: ``python -m testing.chaos --minutes 3 --seed 1``.

Every job has a random layout, door and fault. It must end in success, or within its bound with a sentence that names
the rank that met the fault, and no other. Nothing of it may remain, and every checkpoint that it published must load.
Then the same job starts again, undisturbed, and where its losses do not depend on it, at another layout: it must go on
from its newest whole checkpoint and have the loss curve of a job that nothing happened to. The faults are those of
torchft's and NVIDIA's resiliency extension's tests, and more.
"""
