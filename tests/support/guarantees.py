"""What must hold after every case, whatever it was about.

G1  a plain request still gives the text that it gave before
G2  nothing leaked: no request is known, no block is held
G3  a client's fault names its field, and nothing of our insides
G4  the pieces of a stream are the text; there is exactly one final message, and it has the summary
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from draftline_server.engine import Engine
from draftline_server.errors import InvalidRequestError
from support.engines import Completion, generate

PROBE_PROMPT = (7, 11, 13, 8, 9)
_INSIDES = re.compile(r"Traceback|Error\b|Exception|\.py\b|/[a-z_]+/|draftline_server|object at 0x")


@contextmanager
def guarded(engine: Engine, *, prompt: Sequence[int] = PROBE_PROMPT, max_tokens: int = 4) -> Iterator[None]:
    """G1 and G2 around a case that leaves the engine idle."""
    assert_idle(engine)
    before = generate(engine, [prompt], max_tokens=max_tokens)[0]
    yield
    assert_idle(engine)
    after = generate(engine, [prompt], max_tokens=max_tokens)[0]
    assert (after.token_ids, after.text) == (before.token_ids, before.text)
    assert_idle(engine)


def drafts_of(engine: Engine) -> tuple[set[str], int, int]:
    """Whose drafts there were, and how many tokens were drafted and accepted."""
    statistics = engine.statistics()
    proposers = {name for name, count in statistics.draft_tokens.items() if count}
    return proposers, sum(statistics.draft_tokens.values()), sum(statistics.accepted_tokens.values())


def assert_idle(engine: Engine) -> None:
    """G2. Blocks that only the prefix cache holds count as free."""
    statistics = engine.statistics()
    assert not engine.has_work
    assert (statistics.num_running, statistics.num_waiting) == (0, 0)
    assert (statistics.kv_blocks_used, statistics.kv_usage_ratio) == (0, 0.0)
    engine.check_integrity()


@contextmanager
def refused(field: str) -> Iterator[pytest.ExceptionInfo[InvalidRequestError]]:
    """G3: the block raises an error that names `field` and could be sent to a client."""
    with pytest.raises(InvalidRequestError) as caught:
        yield caught
    assert caught.value.field == field
    message = str(caught.value)
    assert message.startswith(f"{field}: ")
    assert not _INSIDES.search(message), message
    assert len(message.splitlines()) == 1


def assert_whole(completion: Completion, decode: Callable[[Sequence[int]], str]) -> None:
    """G4 for a completion without a stop string; `drain` has seen that nothing follows the final delta."""
    assert completion.summary is not None
    assert completion.error is None
    assert completion.summary.num_output_tokens == len(completion.token_ids)
    assert completion.text == decode(completion.token_ids)
    for chunk in completion.chunks:
        chunk.encode()  # valid UTF-8: no lone surrogates


def assert_same_output(actual: Completion, expected: Completion) -> None:
    """Everything that a client sees of two completions, but for timings and speculation counts."""
    assert actual.summary is not None
    assert expected.summary is not None
    assert actual.token_ids == expected.token_ids
    assert actual.text == expected.text
    assert actual.summary.finish_reason == expected.summary.finish_reason
    assert actual.summary.matched_stop == expected.summary.matched_stop


def acceptance(completion: Completion) -> float:
    """Share of the drafted tokens that stood."""
    assert completion.summary is not None
    stats = completion.summary.speculation
    assert stats.draft_tokens > 0, "nothing was drafted"
    assert sum(stats.accepted_tokens_per_position) == stats.accepted_tokens
    return stats.accepted_tokens / stats.draft_tokens
