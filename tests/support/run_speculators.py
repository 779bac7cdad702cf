"""With the `speculators` library on the path: what its own model makes of heads, tokens and hidden states.

Reads a JSON list of jobs from stdin: ``head`` (directory), ``inputs`` (safetensors with ``token_ids`` and
``captured``), ``steps``. Writes a JSON list: for each job the draft token ids ``[steps][rows]``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from safetensors.torch import load_file
from speculators.models.eagle3 import (  # type: ignore[import-not-found]
    Eagle3DraftModel,
    Eagle3SpeculatorConfig,
)


def run(job: dict[str, Any]) -> list[list[int]]:
    config = Eagle3SpeculatorConfig.from_pretrained(job["head"])
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel(config)
    tensors = load_file(f"{job['head']}/model.safetensors")
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected, unexpected
    assert all("verifier" in name for name in missing), missing
    inputs = load_file(job["inputs"])
    token_ids, captured = inputs["token_ids"], inputs["captured"]
    num_rows = len(token_ids) - 1
    with torch.no_grad():
        drafted = model.float().eval()(
            hidden_states=captured[None, :-1],
            input_ids=token_ids[None, 1:],
            document_ids=torch.zeros(1, num_rows, dtype=torch.long),
            position_ids=torch.arange(1, num_rows + 1)[None],
            ttt_steps=job["steps"],
        )
    return [step[0].tolist() for step in drafted]


if __name__ == "__main__":
    json.dump([run(job) for job in json.load(sys.stdin)], sys.stdout)
