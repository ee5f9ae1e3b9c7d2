"""`python -m batchgen` is the command line."""

import sys

from batchgen.cli import main

sys.exit(main())
