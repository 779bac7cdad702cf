"""Where things are inside the pods, and the names of what is mounted there. All of it is reserved."""

from __future__ import annotations

from typing import Final

CONFIG_DIRECTORY: Final = "/etc/draftline"
CONFIG_FILE: Final = "config.yaml"
CONFIG_PATH: Final = f"{CONFIG_DIRECTORY}/{CONFIG_FILE}"
MODELS_DIRECTORY: Final = "/models"
MODEL_CACHE_DIRECTORY: Final = f"{MODELS_DIRECTORY}/cache"
# Of libraries: compiled kernels, downloads in progress. Lives as long as the pod.
WORK_DIRECTORY: Final = "/var/cache/draftline"
HUGGING_FACE_DIRECTORY: Final = f"{WORK_DIRECTORY}/huggingface"
SHARED_MEMORY_DIRECTORY: Final = "/dev/shm"
TEMPORARY_DIRECTORY: Final = "/tmp"
TERMINATION_LOG: Final = "/dev/termination-log"

CONFIG_VOLUME: Final = "config"
MODEL_CACHE_VOLUME: Final = "model-cache"
WORK_VOLUME: Final = "work"
SHARED_MEMORY_VOLUME: Final = "shared-memory"
TEMPORARY_VOLUME: Final = "tmp"

RESERVED_PATHS: Final = (
    CONFIG_DIRECTORY,
    MODELS_DIRECTORY,
    WORK_DIRECTORY,
    SHARED_MEMORY_DIRECTORY,
    TEMPORARY_DIRECTORY,
    TERMINATION_LOG,
)
