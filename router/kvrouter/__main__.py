"""`python -m kvrouter`: the command line."""

import sys

from kvrouter.cli.main import main

sys.exit(main())
