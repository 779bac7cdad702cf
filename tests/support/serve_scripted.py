"""Run as a script: a server process around a scripted engine whose steps take a moment."""

from __future__ import annotations

import sys
import time

from draftline_server.app import run
from draftline_server.config import parse_config
from draftline_server.core.generation import GenerationDelta
from draftline_server.log import configure_logging
from draftline_server.testing import ScriptedEngine, build_scripted_pair

STEP_SECONDS = 0.03


class SlowEngine(ScriptedEngine):
    def step(self) -> list[GenerationDelta]:
        time.sleep(STEP_SECONDS)
        return super().step()


def main() -> int:
    configure_logging(level="info", log_format="json")
    config = parse_config(
        {
            "server": {"host": "127.0.0.1", "grpc_port": 0, "admin_port": 0, "lame_duck_seconds": 0.1},
            "models": {"target_model": {"path": "unused"}},
        }
    )
    return run(config, lambda _: build_scripted_pair(SlowEngine()))


if __name__ == "__main__":
    sys.exit(main())
