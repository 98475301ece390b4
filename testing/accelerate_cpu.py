"""Runs a script of Accelerate with DeepSpeed on CPUs: ``python -m testing.accelerate_cpu [-m] NAME ARGUMENTS...``.

Accelerate 1.15 has no words for that. ``cpu=True`` and ACCELERATE_USE_CPU set DeepSpeed aside, and torch's DDP trains;
without them, every rank believes that it is alone. A state that is made ahead of the script knows all ranks.
"""

import sys

from accelerate.state import PartialState

from testing.cpu_shim import main

if __name__ == "__main__":
    PartialState(cpu=True)
    main(sys.argv[1:])
