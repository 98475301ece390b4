"""``python -m ds_lgamp``."""

import sys

from ds_lgamp.cli.main import main

# Guarded: worker processes that a script spawns import this module again.
if __name__ == "__main__":
    sys.exit(main())
