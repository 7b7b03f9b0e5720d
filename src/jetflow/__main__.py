"""`python -m jetflow`."""

import sys

from jetflow.cli import main

sys.exit(main())
