"""Where the checkout is, wherever a test lies in it."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
