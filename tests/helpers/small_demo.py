"""The demo in small, with the encoder of a folder; each worker's clock shows another second."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from typing import Any
from unittest import mock

from tasks import demo

SMALL: dict[str, Any] = {"examples": 150, "epochs": 2, "batch_size": 15, "tensorboard": False, "device": "cpu"}


def main(encoder: str) -> None:
    """All that the demo does."""
    demo.PRIVATE = replace(demo.PRIVATE, pretrained=encoder, **SMALL)
    demo.CHOSEN |= SMALL.keys()
    demo.PLAIN = replace(demo.PLAIN, pretrained=encoder, **SMALL)
    stamp = f"2026-{os.environ.get('HOROVOD_RANK', '0')}"
    with mock.patch.object(time, "strftime", return_value=stamp):
        demo.main()


if __name__ == "__main__":
    main(sys.argv[1])
