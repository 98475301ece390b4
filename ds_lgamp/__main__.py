"""``python -m ds_lgamp``."""

import sys

from ds_lgamp.cli import main

sys.exit(main())
