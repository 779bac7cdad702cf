"""The state of one request while the engine works on it. Owned by the engine's thread alone.

Lengths, in tokens, and the invariant that ties them:

    0 <= draft_start <= draft_len <= target_len < num_tokens    (strictly: the newest is never cached)

    token_ids    [ prompt ............ | output ........ newest ]
    target_len   [ keys and values of the target are valid  )
    draft_len      [ ... of the draft  )
    draft_start    ^ 0 for a draft model; a draft head cannot read again what it has missed

Rolling back rejected drafts is nothing but leaving these lengths where they belong: stale slots are
overwritten by the next forward.
"""

from __future__ import annotations

from functools import cached_property

from draftline_server.core.block_pool import BlockHash, hash_block
from draftline_server.core.generation import GenerationRequest, SpeculationStats


class Request:
    """A request, its tokens, its place in the cache and its counts."""

    def __init__(self, spec: GenerationRequest, *, seed: int, sequence_number: int) -> None:
        self.spec = spec
        self.seed = seed
        """Keys all noise of this request; drawn at random where the client gave none."""
        self.sequence_number = sequence_number
        """Order of arrival."""
        self.token_ids: list[int] = list(spec.prompt_token_ids)
        self.block_table: list[int] = []
        self.target_len = 0
        self.draft_start = 0
        self.draft_len = 0
        self.num_cached_tokens = 0
        """Prompt tokens found in the prefix cache."""
        self.num_remembered_blocks = 0
        """Leading blocks that the prefix cache knows."""
        self.num_draft_marked_blocks = 0
        """Leading blocks of which the pool knows whether the draft has written them, too."""
        self.first_scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.stats = SpeculationStats()
        self._block_hashes: list[BlockHash] = []

    @property
    def request_id(self) -> str:
        return self.spec.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.spec.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def max_tokens(self) -> int:
        assert self.spec.sampling.max_tokens is not None, "admission sets max_tokens"
        return self.spec.sampling.max_tokens

    def end_token_ids(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """Tokens that end its generation, of a model with these end-of-sequence tokens."""
        sampling = self.spec.sampling
        return frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos_token_ids)

    @cached_property
    def distinct_prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt's ids, each once; a repetition penalty needs them for every row."""
        return tuple(set(self.spec.prompt_token_ids))

    @property
    def num_remaining_tokens(self) -> int:
        """Output tokens that may still come."""
        return self.max_tokens - self.num_output_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Committed tokens that the target has not read; 1 means ready to decode."""
        return self.num_tokens - self.target_len

    @property
    def is_decoding(self) -> bool:
        return self.num_uncomputed_tokens == 1

    @property
    def scheduling_key(self) -> tuple[int, int]:
        """Sorts by who goes first: higher priority, then earlier arrival."""
        return (-self.spec.priority, self.sequence_number)

    def block_hashes(self, count: int, block_size: int) -> list[BlockHash]:
        """Hashes of the first `count` blocks, all of which are full of committed tokens."""
        while len(self._block_hashes) < count:
            start = len(self._block_hashes) * block_size
            assert start + block_size <= self.num_tokens, "only full blocks have a hash"
            previous = self._block_hashes[-1] if self._block_hashes else b""
            self._block_hashes.append(hash_block(previous, self.token_ids[start : start + block_size]))
        return self._block_hashes[:count]

    def rewind(self) -> None:
        """Forgets the cache; all committed tokens are to be computed again."""
        self.block_table = []
        self.target_len = self.draft_start = self.draft_len = 0
        self.num_remembered_blocks = self.num_draft_marked_blocks = 0

    def check_lengths(self) -> None:
        """Raises AssertionError where the invariant of the module docstring is broken."""
        assert 0 <= self.draft_start <= self.draft_len <= self.target_len < self.num_tokens, (
            f"draft_start {self.draft_start}, draft_len {self.draft_len}, target_len {self.target_len}, "
            f"num_tokens {self.num_tokens}"
        )
