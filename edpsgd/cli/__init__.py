"""The ``edpsgd`` command: one module for each of its commands, and one for what they share."""

from edpsgd.cli.command_line import main

__all__ = ["main"]
