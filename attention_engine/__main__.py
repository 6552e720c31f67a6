"""python -m attention_engine: doctor, tune, explain, cache, show, check, bench."""

import sys

from attention_engine.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
