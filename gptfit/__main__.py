"""`python -m gptfit`."""

import sys

from gptfit.cli import main

if __name__ == "__main__":
    sys.exit(main())
