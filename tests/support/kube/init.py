"""Process 1 of a cluster's namespaces: reaps what lost its parent, and ends when its owner closes its input.

When it ends, however that happens, the kernel ends every process of the namespace with it, and drops the
mounts and the network that they alone used: nothing has to clean up after an owner that was killed.
"""

from __future__ import annotations

import os
import signal
import sys


def reap(*_: object) -> None:
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        pass


signal.signal(signal.SIGCHLD, reap)
print("ready", flush=True)
sys.stdin.buffer.read()
