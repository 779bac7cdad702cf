"""Greedy output of a real model, SmolLM2, is that of transformers, however it was drafted and batched.

In float32. A draft can be right, wrong or both here as with the tiny models; what these lack is a vocabulary
of 49 152 tokens, 30 layers, and text that means something.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import pytest

from draftline_server.core.sampling_params import SpeculationParams
from draftline_server.engine import Engine
from draftline_server.model.tokenizer import Tokenizer
from support.engines import Completion, generate, make_engine
from support.guarantees import acceptance, assert_idle, drafts_of
from support.reference import Reference
from support.tiny_models import make_tiny_model, noised_clone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.usefixtures("fixed_randomness")]

Source = Literal["ngram", "self", "noised", "unrelated", "chain", "head"]
METHODS: dict[Source, tuple[str, ...]] = {"ngram": ("ngram",), "chain": ("ngram", "draft_model")}
DRAFT_LENGTHS = (0, 1, 2, 4, 8)
# New tokens by number of streams: of 32 a whole draft, what comes before and after it, and one more.
STREAMS = {1: 32, 8: 32, 32: max(DRAFT_LENGTHS) + 3}
HEAD = (
    Path(__file__).resolve().parents[2]
    / "server"
    / "draftline_server"
    / "heads"
    / "smollm2-135m-instruct-eagle3"
)
NEW_TOKENS = max(STREAMS.values())
# After preemption and prefix hits: of the requests in turn, and tokens enough for a whole draft of each.
LENGTHS_IN_TURN = DRAFT_LENGTHS[1:]
FEW_TOKENS = 16
BLOCK_SIZE = 16
NOISE_SCALE = 0.02
VOCAB_SIZE = 49_152
TEXTS = (
    "def add(left, right):\n    return left + right\n\ndef subtract(left, right):\n",
    " ".join(["echo"] * 48),
    "The three most important facts about the moon are",
    "1, 1, 2, 3, 5, 8,",
)


@dataclass(frozen=True)
class Workload:
    """Prompts and what transformers' `generate` makes of them, computed once."""

    prompts: list[list[int]]
    expected: list[list[int]]

    def check(self, completions: Sequence[Completion], *, num_tokens: int) -> None:
        """Of the first prompts; greedy output of fewer tokens is the beginning of that of more."""
        for index, completion in enumerate(completions):
            assert completion.token_ids == self.expected[index][:num_tokens], f"prompt {index}"


@pytest.fixture(scope="module")
def workload(smollm2: Path) -> Workload:
    """32 prompts: each text several times, its tail cut at another place each time."""
    tokenizer = Tokenizer.load(smollm2)
    whole = [tokenizer.encode(text) for text in TEXTS]
    whole.append(tokenizer.encode_chat([("user", "Write one sentence about rain.")]))
    prompts = [prompt[: len(prompt) - index // len(whole)] for index, prompt in enumerate(whole * 7)][:32]
    reference = Reference(smollm2)
    return Workload(prompts, [reference.greedy(prompt, NEW_TOKENS) for prompt in prompts])


@pytest.fixture(scope="module")
def drafts(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Source, Path | None]:
    root = tmp_path_factory.mktemp("drafts")
    noised = noised_clone(smollm2, root / "noised", scale=NOISE_SCALE)
    unrelated = make_tiny_model(root / "unrelated", vocab_size=VOCAB_SIZE, tokenizer=None)
    return {
        "ngram": None,
        "self": smollm2,
        "noised": noised,
        "unrelated": unrelated,
        "chain": noised,
        "head": HEAD,
    }


def engine_of(
    target: Path, draft: Path | None, source: Source, *, num_blocks: int = 512, prefix_caching: bool = True
) -> Engine:
    return make_engine(
        target,
        draft,
        num_blocks=num_blocks,
        max_context_length=min(512, num_blocks * BLOCK_SIZE),
        inference={"prefix_caching": prefix_caching},
        speculation={"methods": METHODS.get(source, ("draft_model",)), "num_speculative_tokens": 8},
    )


@pytest.mark.parametrize("source", get_args(Source))
def test_greedy_output_depends_on_neither_proposer_nor_draft_length_nor_batch(
    smollm2: Path, workload: Workload, drafts: dict[Source, Path | None], source: Source
) -> None:
    engine = engine_of(smollm2, drafts[source], source, prefix_caching=False)
    for draft_length in DRAFT_LENGTHS:
        for streams, num_tokens in STREAMS.items():
            completions = generate(
                engine,
                workload.prompts[:streams],
                max_tokens=num_tokens,
                speculation=SpeculationParams(max_draft_tokens=draft_length),
            )
            workload.check(completions, num_tokens=num_tokens)
    assert_drafted_as_expected(engine, source)
    assert_idle(engine)


def assert_drafted_as_expected(engine: Engine, source: Source) -> None:
    """The case is about drafts that stand, fall, or both: this sees that they did."""
    proposers, drafted, accepted = drafts_of(engine)
    assert proposers == set(METHODS.get(source, ("draft_model",)))
    match source:
        case "self":
            assert accepted == drafted
        case "unrelated":
            assert accepted < drafted / 20
        case "head":
            assert drafted / 20 < accepted < drafted
        case _:
            assert drafted / 10 < accepted < drafted


@pytest.mark.parametrize("source", get_args(Source))
def test_greedy_output_is_the_same_after_preemption(
    smollm2: Path, workload: Workload, drafts: dict[Source, Path | None], source: Source
) -> None:
    # The first six prompts take all of it, and the second one fills its blocks: it needs another at once.
    engine = engine_of(smollm2, drafts[source], source, num_blocks=13)
    completions = generate(engine, workload.prompts[:8], draft_lengths=LENGTHS_IN_TURN, max_tokens=FEW_TOKENS)
    assert engine.statistics().num_preemptions > 0
    workload.check(completions, num_tokens=FEW_TOKENS)
    if source == "self":
        assert all(acceptance(completion) == 1.0 for completion in completions)


@pytest.mark.parametrize("source", get_args(Source))
def test_greedy_output_is_the_same_after_prefix_hits(
    smollm2: Path, workload: Workload, drafts: dict[Source, Path | None], source: Source
) -> None:
    engine = engine_of(smollm2, drafts[source], source)
    prompts = workload.prompts[:8]
    for draft_lengths in (LENGTHS_IN_TURN, LENGTHS_IN_TURN[::-1]):
        completions = generate(engine, prompts, draft_lengths=draft_lengths, max_tokens=FEW_TOKENS)
        workload.check(completions, num_tokens=FEW_TOKENS)
    cached = [completion.summary.num_cached_tokens for completion in completions if completion.summary]
    # Of each prompt all full blocks, but for the last token: its logits are needed.
    assert cached == [(len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in prompts]
    assert engine.statistics().prefix_cache_hits >= sum(cached) > 0
    if source == "self":
        assert all(acceptance(completion) == 1.0 for completion in completions)
