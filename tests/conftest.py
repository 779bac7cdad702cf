"""What holds for every test: no test reaches the network, and tiny models get one thread."""

import os

# Before transformers and torch are imported, which read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # more only adds waiting to matrices this small
