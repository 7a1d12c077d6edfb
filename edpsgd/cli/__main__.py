"""``python -m edpsgd.cli``: the command without its installed script."""

import sys

from edpsgd.cli.command_line import main

if __name__ == "__main__":
    sys.exit(main())
