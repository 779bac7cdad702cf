"""Whether a draft model can draft for a target: they must mean the same by every token id.

A draft with another vocabulary runs without any error and is never right, so this is found out before a
weight is loaded. Token maps are compared, not sizes: padding rows of an embedding are fine.

Choices: the maps must be equal, for ids that only one of the two has would have to be masked in each
draft. Which tokens begin and end a text is the target's affair, so a base model may draft for its
instruction-tuned sibling. A draft whose context is shorter than the served one is refused, with the key
to lower, instead of drafting for short requests only.
"""

from __future__ import annotations

from collections.abc import Mapping

from draftline_server.errors import ConfigError, InvalidRequestError, ModelError, PairMismatchError
from draftline_server.model.architecture import ModelFacts
from draftline_server.model.tokenizer import Tokenizer

# Equal maps can still have other merges, normalization or digits.
_PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    "  two  spaces,\ttabs\n\nand lines  ",
    "def f(x):\n    return x[0] + 12345.678  # ok",
    "Zażółć gęślą jaźń, naïve café, ﬁne",
    "日本語のテキスト 한국어 العربية",
    "🙂👩‍👩‍👧 \u200d \u00a0",
    "https://example.org/?a=1&b=2 <b>'quoted'</b> \"it's\"",
)
_SHOWN_CHARACTERS = 40


def check_vocabulary(tokenizer: Tokenizer, facts: ModelFacts) -> None:
    """Raises `ModelError` where the tokenizer has ids that the model has no row for."""
    if tokenizer.vocab_size > facts.vocab_size:
        raise ModelError(
            f"its tokenizer has ids up to {tokenizer.vocab_size - 1}, but the model only {facts.vocab_size} "
            "rows (vocab_size in config.json)"
        )


def check_tokenizers(target: Tokenizer, draft: Tokenizer) -> None:
    """Raises `PairMismatchError` unless both tokenizers are the same one."""
    target_map, draft_map = target.token_map(), draft.token_map()
    if target_map != draft_map:
        raise PairMismatchError(_explain_difference(target_map, draft_map))
    for probe in _PROBES:
        if _encode(target, probe) != _encode(draft, probe):
            raise PairMismatchError(
                f"its tokenizer has the target's {len(target_map)} tokens, but cuts {_quote(probe)} "
                "in another way"
            )


def _encode(tokenizer: Tokenizer, probe: str) -> list[int] | None:
    """None where it cannot: then neither may the other one."""
    try:
        return tokenizer.encode_plain(probe)
    except InvalidRequestError:
        return None


def check_context_lengths(
    *, max_context_length: int | None, target: ModelFacts, draft: ModelFacts | None
) -> int:
    """The served context length; raises `ConfigError` where a model's is shorter."""
    key = "inference.max_context_length"
    served = max_context_length or target.max_position_embeddings
    if served > target.max_position_embeddings:
        raise ConfigError(
            f"{key}: {served} is above the target model's {target.max_position_embeddings} "
            "(max_position_embeddings)"
        )
    if draft is not None and served > draft.max_position_embeddings:
        origin = "" if max_context_length else ", the target model's own,"
        raise ConfigError(
            f"{key}: {served}{origin} is above the draft model's {draft.max_position_embeddings}; "
            f"set {key} to {draft.max_position_embeddings} or less"
        )
    return served


def _explain_difference(target: Mapping[str, int], draft: Mapping[str, int]) -> str:
    target_tokens = {token_id: token for token, token_id in target.items()}
    draft_tokens = {token_id: token for token, token_id in draft.items()}
    different = [
        token_id
        for token_id in sorted(target_tokens.keys() | draft_tokens.keys())
        if target_tokens.get(token_id) != draft_tokens.get(token_id)
    ]
    first = different[0]
    return (
        f"its vocabulary of {len(draft)} tokens differs from the target's of {len(target)} in "
        f"{len(different)} ids; the first, {first}, is {_quote(target_tokens.get(first))} for the target and "
        f"{_quote(draft_tokens.get(first))} for the draft"
    )


def _quote(token: str | None) -> str:
    if token is None:
        return "no token"
    return repr(token if len(token) <= _SHOWN_CHARACTERS else f"{token[:_SHOWN_CHARACTERS]}...")
