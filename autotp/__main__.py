"""`python -m autotp`, which is also how torchrun starts the command line."""

import sys

from autotp.cli.main import main

sys.exit(main())
