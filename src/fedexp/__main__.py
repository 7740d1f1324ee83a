"""`python -m fedexp`."""

import sys

from fedexp.cli.main import main

sys.exit(main())
