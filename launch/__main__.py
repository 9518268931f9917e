"""`python -m megamoe.launch CONFIG ...` does what `megamoe launch CONFIG ...` does."""

from __future__ import annotations

import sys

from megamoe.cli import main

if __name__ == "__main__":
    sys.exit(main(["launch", *sys.argv[1:]]))
