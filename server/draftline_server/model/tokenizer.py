"""A model's tokenizer as the server uses it: text or chat in, token ids out, and back.

transformers loads it; encoding and decoding then go straight to the `tokenizers` backend, whose methods
are thread-safe, while transformers' own change truncation and padding of the shared backend on the way.
Decoding never "cleans up" spaces, since that would depend on what comes next.

Two policies about text that spells a control token, such as ``<|im_end|>``:

- `encode` is the raw path for those who build prompts themselves: it reads such text as the token, as
  transformers does.
- `encode_chat` takes content from people who do not know the template. Only the template makes control
  tokens there: such text in a message becomes plain text. Control tokens are the tokenizer's special
  ones; other added tokens (a newline run, ``<tool_call>``) stay what they are, because templates and
  models rely on them in ordinary text.

How `encode_chat` does it: a separator that no text has, and that the tokenizer knows as a token, is put
inside every such text before the template is rendered; its token is dropped afterwards. Templates
may strip, cut or compare content as they like. Content without such text is not touched and gives exactly
the ids of transformers' `apply_chat_template`. (A tokenizer that begins each piece of text with a space,
as Llama 2's does, puts one where the separator was.)
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from draftline_server.errors import InvalidRequestError, ModelError
from draftline_server.model.architecture import read_json_object

# Unicode keeps these code points out of text for good.
_SEPARATOR = "\ufdd0\ufdef"
_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_STANDARD_ROLES = frozenset({"system", "user", "assistant"})
_QUOTED_NAME = re.compile(r"""['"]([A-Za-z][A-Za-z0-9_-]{0,31})['"]""")
_SHOWN_CHARACTERS = 200


class Tokenizer:
    """Immutable once made, and safe to use from any thread."""

    def __init__(self, backend: PreTrainedTokenizerFast) -> None:
        self._transformers = backend
        self._backend: tokenizers.Tokenizer = backend.backend_tokenizer
        self._backend.no_truncation()  # tokenizer.json may ask for both
        self._backend.no_padding()
        self._token_map: dict[str, int] = backend.get_vocab()
        self._template = _find_chat_template(backend)
        self._chat = _ChatEncoder(backend, self._template) if self._template is not None else None

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Loads a tokenizer from a model directory; raises `ModelError` naming it."""
        if not any((directory / name).exists() for name in _TOKENIZER_FILES):
            raise ModelError(f"{directory}: no tokenizer: none of {', '.join(_TOKENIZER_FILES)} is there")
        loader = PreTrainedTokenizerFast if _declares_generic_class(directory) else AutoTokenizer
        try:
            backend = loader.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # transformers raises anything, and seldom names the file
            if (directory / "tokenizer.json").exists():
                read_json_object(directory / "tokenizer.json")
            reason = " ".join(str(error).split())[:_SHOWN_CHARACTERS]
            raise ModelError(f"{directory}: its tokenizer cannot be loaded: {reason}") from error
        if not isinstance(backend, PreTrainedTokenizerFast):
            raise ModelError(f"{directory}: no tokenizer.json, nor files that transformers turns into one")
        if not backend.get_vocab():
            raise ModelError(f"{directory}: its tokenizer has no tokens")
        try:
            tokenizer = cls(backend)
            tokenizer.try_chat()
        except (jinja2.TemplateSyntaxError, TypeError) as error:
            reason = " ".join(str(error).split())[:_SHOWN_CHARACTERS]
            raise ModelError(f"{directory}: its chat template cannot be used: {reason}") from error
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id."""
        return max(self._token_map.values()) + 1

    @property
    def bos_token_id(self) -> int | None:
        token_id: int | None = self._transformers.bos_token_id
        return token_id

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    def token_map(self) -> dict[str, int]:
        """Token text, in the vocabulary's own spelling, to id."""
        return dict(self._token_map)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, with the beginning-of-text token where the model has one.

        Raises `InvalidRequestError` for a text without any token: a model needs one to start from.
        """
        ids = _encode(self._backend, text, field="text", add_special_tokens=True)
        if not ids:
            raise InvalidRequestError("text", "is empty, and this model has no token that begins a text")
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of `text` alone; may be empty."""
        return _encode(self._backend, text, field="text", add_special_tokens=False)

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Ids of (role, content) messages and the beginning of the assistant's answer.

        Raises `InvalidRequestError` for what the chat template refuses.
        """
        if self._chat is None:
            raise InvalidRequestError("chat", "this model has no chat template; use text or token_ids")
        return self._chat.encode(messages)

    def try_chat(self) -> None:
        """Raises `jinja2.TemplateSyntaxError` where the chat template is none, such as a truncated one."""
        if self._chat is not None:
            with suppress(InvalidRequestError):  # it may take other chats
                self._chat.encode([("user", "text")])

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids; an id that is no token gives no text."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text


def _encode(backend: tokenizers.Tokenizer, text: str, *, field: str, add_special_tokens: bool) -> list[int]:
    """Ids of one text.

    In a batch of its own, because `encode` holds the interpreter's lock, for seconds where a text is long;
    the fast variant leaves out offsets, which nobody reads. Raises `InvalidRequestError` for a text that a
    tokenizer without an unknown token cannot spell.
    """
    try:
        encodings = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    except Exception as error:  # the backend raises nothing more special
        raise InvalidRequestError(field, "has characters for which this model has no token") from error
    ids: list[int] = encodings[0].ids
    return ids


class _ChatEncoder:
    """Renders a chat template and tokenizes the result, so that only the template makes control tokens."""

    def __init__(self, backend: PreTrainedTokenizerFast, template: str) -> None:
        self._transformers = backend
        self._roles = _STANDARD_ROLES | set(_QUOTED_NAME.findall(template))
        control = {i: token.content for i, token in backend.added_tokens_decoder.items() if token.special}
        self._control_ids = frozenset(control)
        self._control_texts = frozenset(text for text in control.values() if text)
        self._heads = frozenset(text[:n] for text in self._control_texts for n in range(1, len(text)))
        self._tails = frozenset(text[-n:] for text in self._control_texts for n in range(1, len(text)))
        self._longest = max(map(len, self._control_texts), default=0)
        self._backend = _copy_matching_verbatim(backend)
        self._backend.add_tokens([tokenizers.AddedToken(_SEPARATOR, normalized=False, special=False)])
        self._separator_id = self._backend.token_to_id(_SEPARATOR)

    def encode(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        self._check(messages)
        separated = [(role, self._separate_inside(content)) for role, content in messages]
        token_ids = self._encode_rendered(separated)
        at_edges = [(role, self._separate_edges(content)) for role, content in separated]
        if at_edges != separated:
            # Seldom needed, and text that merges over the edge would lose by it: only where it matters.
            safe_ids = self._encode_rendered(at_edges)
            if self._control_ids_of(safe_ids) != self._control_ids_of(token_ids):
                return safe_ids
        return token_ids

    def _check(self, messages: Sequence[tuple[str, str]]) -> None:
        if not messages:
            raise InvalidRequestError("chat.messages", "is empty")
        for index, (role, content) in enumerate(messages):
            if role not in self._roles:
                known = ", ".join(sorted(self._roles))
                reason = f"this model's chat template knows no such role; it may know {known}"
                raise InvalidRequestError(f"chat.messages[{index}].role", reason)
            for character in sorted(self._control_texts.intersection(content)):  # cannot be separated
                reason = f"contains U+{ord(character):04X}, a control token of this model"
                raise InvalidRequestError(f"chat.messages[{index}].content", reason)

    def _encode_rendered(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        ids = _encode(self._backend, self._render(messages), field="chat.messages", add_special_tokens=False)
        return [token_id for token_id in ids if token_id != self._separator_id]

    def _render(self, messages: Sequence[tuple[str, str]]) -> str:
        try:
            rendered: Any = self._transformers.apply_chat_template(
                [{"role": role, "content": content} for role, content in messages],
                tokenize=False,
                add_generation_prompt=True,
            )
        except jinja2.TemplateSyntaxError:
            raise  # no chat's fault
        except jinja2.TemplateError as error:  # what a template raises itself is written for the caller
            reason = " ".join((error.message or "").replace(_SEPARATOR, "").split())[:_SHOWN_CHARACTERS]
            message = f"refused by the chat template: {reason}"
            raise InvalidRequestError("chat.messages", message, quotes_input=True) from error
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise InvalidRequestError("chat.messages", "the chat template cannot render them") from error
        if not rendered:
            raise InvalidRequestError("chat.messages", "the chat template renders them as nothing")
        return str(rendered)

    def _separate_inside(self, content: str) -> str:
        """Puts a separator after the first character of each control token's text."""
        texts = (text for text in self._control_texts if text in content)
        return _insert(
            _SEPARATOR, content, {start + 1 for text in texts for start in _find_all(text, content)}
        )

    def _separate_edges(self, content: str) -> str:
        """Puts a separator where the text beside the content could complete a control token.

        That is after a last word that begins one, and before a first word that ends one; whitespace stays
        outermost, for the templates that strip it.
        """
        positions = set()
        begin, end = len(content) - len(content.lstrip()), len(content.rstrip())
        if any(content[max(end - n, 0) : end] in self._heads for n in range(1, self._longest)):
            positions.add(end)
        if any(content[begin : begin + n] in self._tails for n in range(1, self._longest)):
            positions.add(begin)
        return _insert(_SEPARATOR, content, positions)

    def _control_ids_of(self, token_ids: list[int]) -> list[int]:
        return [token_id for token_id in token_ids if token_id in self._control_ids]


def _declares_generic_class(directory: Path) -> bool:
    """Whether tokenizer.json says it all.

    `AutoTokenizer` would go by the model's architecture all the same and add tokens that its usual
    tokenizer has, for which this model may have no row.
    """
    config = directory / "tokenizer_config.json"
    if not config.exists() or not (directory / "tokenizer.json").exists():
        return False
    return read_json_object(config).get("tokenizer_class") in _GENERIC_CLASSES


def _copy_matching_verbatim(backend: PreTrainedTokenizerFast) -> tokenizers.Tokenizer:
    """A copy whose control tokens match only their own spelling, not text that is normalized to it."""
    serialized = backend.backend_tokenizer.to_str()
    if any(token.special and token.normalized for token in backend.added_tokens_decoder.values()):
        document = json.loads(serialized)
        for token in document["added_tokens"]:
            token["normalized"] = token["normalized"] and not token["special"]
        serialized = json.dumps(document)
    return tokenizers.Tokenizer.from_str(serialized)


def _insert(separator: str, content: str, positions: Set[int]) -> str:
    cuts = [0, *sorted(positions), len(content)]
    return separator.join(content[begin:end] for begin, end in itertools.pairwise(cuts))


def _find_all(text: str, content: str) -> list[int]:
    """Where `text` begins in `content`, overlaps included."""
    starts = []
    start = content.find(text)
    while start >= 0:
        starts.append(start)
        start = content.find(text, start + 1)
    return starts


def _find_chat_template(backend: PreTrainedTokenizerFast) -> str | None:
    """The default template; a model may have several, of which one may be the default."""
    if not backend.chat_template:
        return None
    try:
        template: str = backend.get_chat_template()
    except ValueError:  # several, none of them the default
        return None
    return template
