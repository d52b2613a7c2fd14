"""``python -m dsde``."""

import sys

from dsde.cli import main

sys.exit(main())
