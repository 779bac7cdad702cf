"""What holds for every test: no test reaches the network."""

import os

# Before transformers is imported, which reads it once.
os.environ["HF_HUB_OFFLINE"] = "1"
