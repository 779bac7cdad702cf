"""On a GPU, too, speculation changes no token: float32, greedy, against `transformers`.

``DRAFTLINE_TEST_DEVICE=cpu`` runs the same tests without a GPU, to see that they work.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftline_server.config import InferenceConfig, Method, SpeculativeDecodingConfig
from draftline_server.core.admission import admit
from draftline_server.core.sampling_params import SamplingParams, SpeculationParams
from draftline_server.engine import Engine
from draftline_server.engine_factory import EngineInputs, assemble_engine
from draftline_server.model.loader import load_model
from support.tiny_models import Family, make_tiny_model, noised_clone

DEVICE = torch.device(os.environ.get("DRAFTLINE_TEST_DEVICE", "cuda"))
NEW_TOKENS = 48
NUM_BLOCKS = 256

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE.type == "cuda" and not torch.cuda.is_available(),
        reason="there is no CUDA device on this machine",
    ),
]

CASES = [
    pytest.param((), 0, id="off"),
    pytest.param(("ngram",), 1, id="ngram-1"),
    pytest.param(("ngram",), 8, id="ngram-8"),
    pytest.param(("draft_model",), 1, id="draft_model-1"),
    pytest.param(("draft_model",), 4, id="draft_model-4"),
    pytest.param(("draft_model",), 8, id="draft_model-8"),
    pytest.param(("ngram", "draft_model"), 4, id="chain-4"),
]


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma2"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    family: Family = request.param
    directory = tmp_path_factory.mktemp(family)
    target = make_tiny_model(directory / "target", family)
    return target, noised_clone(target, directory / "draft", scale=0.1)


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = (3, 17, 40, 64, 90)
    prompts = [torch.randint(8, 300, (length,), generator=generator).tolist() for length in lengths]
    # One that repeats, so that n-gram has something to find.
    return [*prompts, prompts[1] * 3]


def make_engine(
    target: Path, draft: Path, methods: tuple[Method, ...], *, num_speculative_tokens: int
) -> Engine:
    def load(path: Path) -> PreTrainedModel:
        return load_model(path, dtype=torch.float32, device=DEVICE)

    return assemble_engine(
        EngineInputs(
            target=load(target),
            draft=load(draft) if "draft_model" in methods else None,
            eos_token_ids=frozenset(),
            decode=lambda ids: "",
            decode_plain=lambda ids: "",
            num_blocks=NUM_BLOCKS,
            max_context_length=512,
            max_running=8,
            inference=InferenceConfig(max_batched_tokens=64),
            speculative_decoding=SpeculativeDecodingConfig(
                enabled=bool(methods),
                methods=methods or ("ngram",),
                num_speculative_tokens=num_speculative_tokens,
                adaptive=False,
                fallback_to_standard_decoding=False,
            ),
        )
    )


def generate(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    outputs: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
        engine.add_request(
            admit(
                request_id=str(index),
                prompt_token_ids=prompt,
                sampling=sampling,
                speculation=SpeculationParams(),
                limits=engine.limits,
                now=0.0,
            )
        )
    while engine.has_work:
        for delta in engine.step():
            outputs[delta.request_id].extend(delta.token_ids)
    return list(outputs.values())


@torch.inference_mode()
def reference(target: Path, prompts: list[list[int]]) -> list[list[int]]:
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    model = model.to(DEVICE).eval()
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=DEVICE)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=[],
            pad_token_id=0,
        )
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs


@pytest.fixture(scope="module")
def expected(pair: tuple[Path, Path]) -> list[list[int]]:
    return reference(pair[0], make_prompts())


@pytest.mark.parametrize(("methods", "num_speculative_tokens"), CASES)
def test_greedy_output_is_that_of_transformers(
    pair: tuple[Path, Path],
    expected: list[list[int]],
    methods: tuple[Method, ...],
    num_speculative_tokens: int,
) -> None:
    engine = make_engine(*pair, methods, num_speculative_tokens=num_speculative_tokens)
    assert generate(engine, make_prompts()) == expected
    engine.check_integrity()


def test_drafts_of_a_noised_clone_are_accepted_in_part(pair: tuple[Path, Path]) -> None:
    engine = make_engine(*pair, ("draft_model",), num_speculative_tokens=4)
    generate(engine, make_prompts())
    statistics = engine.statistics()
    drafted, accepted = statistics.draft_tokens["draft_model"], statistics.accepted_tokens["draft_model"]
    assert 0 < accepted < drafted
