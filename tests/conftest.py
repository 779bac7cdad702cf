"""What holds for every test: no test reaches the network, and tiny models get one thread."""

import logging
import os
from collections.abc import Iterator

import pytest

# Before transformers and torch are imported, which read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # more only adds waiting to matrices this small


@pytest.fixture
def root_logger_as_it_was() -> Iterator[None]:
    """For tests of what configures logging for the whole process."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(capture=False)
