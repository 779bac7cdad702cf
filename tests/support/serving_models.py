"""Tiny real models where serving pods can read them: on the node's disk, for any user."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.tiny_models import make_tiny_model, noised_clone

# Not a dwarf: a step has to take milliseconds, so that streams last without millions of messages.
_SIZES = {"hidden_size": 384, "layers": 4, "max_position_embeddings": 32768}


@dataclass(frozen=True)
class Pair:
    """A target and a draft that agrees with it most of the time."""

    target: Path
    draft: Path

    @property
    def spec(self) -> dict[str, object]:
        """Parts of a resource's spec."""
        return {
            "target": {"model": {"uri": f"file://{self.target}"}},
            "draft": {"model": {"uri": f"file://{self.draft}"}},
        }

    def open_to_all(self) -> None:
        """Pods run as a user of their own."""
        for file in self.target.parent.rglob("*"):
            file.chmod(0o755 if file.is_dir() else 0o644)


def make_target(directory: Path, *, seed: int = 0) -> Path:
    """Another seed is another model of the same shape."""
    return make_tiny_model(directory, seed=seed, **_SIZES)  # type: ignore[arg-type]


@contextmanager
def pair_on_disk() -> Iterator[Pair]:
    folder = Path(tempfile.mkdtemp(prefix="draftline-models-"))
    folder.chmod(0o755)
    try:
        target = make_target(folder / "target")
        pair = Pair(target, noised_clone(target, folder / "draft", scale=0.3))
        pair.open_to_all()
        yield pair
    finally:
        shutil.rmtree(folder)
