"""`python -m fedexp_command`."""

import sys

from fedexp_command import main

sys.exit(main())
