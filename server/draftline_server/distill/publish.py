"""Writes a trained head in the layout of the `speculators` library, whole or not at all.

Embeddings and output layer are left out: they are rows of the target, which every server has.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from draftline_server.distill.features import save_whole
from draftline_server.errors import ConfigError
from draftline_server.model.draft_head import DraftHead
from draftline_server.model.head_checkpoint import DRAFT_TO_TARGET, EMBEDDING, OUTPUT, TARGET_TO_DRAFT

_SPECULATORS_VERSION = "0.9.0"


def check_may_replace(directory: Path) -> None:
    """Raises `ConfigError` where something else than a head is there."""
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    try:
        document = json.loads((directory / "config.json").read_text())
        is_head = document.get("speculators_model_type") == "eagle3"
    except (OSError, ValueError, AttributeError):
        is_head = False
    if not is_head:
        raise ConfigError(f"--out: {directory} is there and holds no draft head; give another directory")


def write_head(
    directory: Path,
    head: DraftHead,
    token_ids: Sequence[int],
    *,
    target_name: str,
    target_architecture: str,
    num_speculative_tokens: int,
    dtype: torch.dtype,
    card: str,
) -> None:
    """Replaces `directory`, if there is one; see `check_may_replace`. Raises `OSError`."""
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors = {
        name: tensor.detach().to(device="cpu", dtype=dtype).contiguous()
        for name, tensor in head.state_dict().items()
        if name not in (EMBEDDING, OUTPUT)
    }
    if len(token_ids) < head.config.vocab_size:
        ids = torch.tensor(token_ids)
        tensors[DRAFT_TO_TARGET] = ids - torch.arange(len(token_ids))
        tensors[TARGET_TO_DRAFT] = torch.zeros(head.config.vocab_size, dtype=torch.bool).index_fill_(
            0, ids, True
        )
    save_whole(tensors, partial / "model.safetensors")
    document = _describe(head, target_name, target_architecture, num_speculative_tokens, dtype)
    (partial / "config.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    (partial / "README.md").write_text(card, encoding="utf-8")
    for path in partial.iterdir():
        path.chmod(0o644)  # safetensors keeps its file to its owner; pods run as others
        with path.open("rb") as file:
            os.fsync(file.fileno())
    # Set aside and not deleted first: a kill must not leave the half of a head that nobody may replace.
    replaced = directory.with_name(f".{directory.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if directory.exists():
        directory.rename(replaced)
    partial.replace(directory)
    shutil.rmtree(replaced, ignore_errors=True)


def _describe(
    head: DraftHead,
    target_name: str,
    target_architecture: str,
    num_speculative_tokens: int,
    dtype: torch.dtype,
) -> dict[str, Any]:
    config = head.config
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": _SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": num_speculative_tokens},
            ],
            "verifier": {"name_or_path": target_name, "architectures": [target_architecture]},
        },
        "transformer_layer_config": config.layer.to_diff_dict(),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(config.layer_ids),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
