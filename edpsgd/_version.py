"""The version, for the package and for what it writes."""

VERSION = "0.1.0"
