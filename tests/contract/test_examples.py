"""The pairs of the examples fit into the memory that the examples give them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from draftline_operator.models.quantity import parse_quantity
from draftline_operator.resources.server_config import server_config
from draftline_server.config import parse_config
from draftline_server.model.architecture import ModelFacts
from draftline_server.model.memory_plan import (
    MemoryBudget,
    PlannedModel,
    check_memory_plan,
    compute_memory_plan,
)
from support.speculative_deployments import resource

EXAMPLES = Path(__file__).resolve().parents[2] / "crds" / "examples"
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


def published(
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    mlp: int,
    vocab: int,
    context: int,
    parameters: int,
) -> ModelFacts:
    """What matters to memory of a model's config.json."""
    return ModelFacts(
        model_type="llama",
        architecture="LlamaForCausalLM",
        num_layers=layers,
        num_attention_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=hidden,
        intermediate_size=mlp,
        vocab_size=vocab,
        max_position_embeddings=context,
        sliding_windows=(None,) * layers,
        num_parameters=parameters,
        has_tied_head=True,
        checkpoint_dtype="bfloat16",
        eos_token_ids=(2,),
    )


# fmt: off
MODELS = {
    "smollm2-1.7b-instruct": published(layers=24, hidden=2048, heads=32, kv_heads=32, head_dim=64, mlp=8192,
                                       vocab=49152, context=8192, parameters=1_711_376_384),
    "smollm2-135m-instruct": published(layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, mlp=1536,
                                       vocab=49152, context=8192, parameters=134_515_008),
    "Llama-3.1-8B-Instruct": published(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, mlp=14336,
                                       vocab=128256, context=131072, parameters=8_030_261_248),
    "Llama-3.2-1B-Instruct": published(layers=16, hidden=2048, heads=32, kv_heads=8, head_dim=64, mlp=8192,
                                       vocab=128256, context=131072, parameters=1_235_814_400),
}
# fmt: on


def memory_of(spec: dict[str, Any]) -> MemoryBudget:
    accelerator = spec.get("accelerator")
    limit = accelerator["memory"] if accelerator else spec["podTemplate"]["resources"]["limits"]["memory"]
    size = int(parse_quantity(limit))
    return MemoryBudget(is_cpu=accelerator is None, total_bytes=size, available_bytes=size, source="example")


def planned(model: dict[str, Any]) -> PlannedModel:
    size = DTYPE_BYTES[model["dtype"]]
    facts = MODELS[model["model"]["uri"].rpartition("/")[2]]
    return PlannedModel(facts, weight_dtype_bytes=size, compute_dtype_bytes=size)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_an_examples_pair_fits_into_its_memory(path: Path) -> None:
    spec = yaml.safe_load(path.read_text(encoding="utf-8"))["spec"]
    config = parse_config(server_config(resource(spec), pair_digest=None))
    plan = compute_memory_plan(
        config,
        budget=memory_of(spec),
        max_context_length=spec["serving"]["maxContextLength"],
        target=planned(spec["target"]),
        draft=planned(spec["draft"]),
    )
    check_memory_plan(plan)
    assert plan.headroom_bytes >= 0
    assert plan.capacity_tokens >= 2 * plan.max_context_length, "more than one long request at once"
