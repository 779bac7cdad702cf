"""Tokenizers small enough to train in a blink, of the three kinds that matter to a detokenizer.

Everything is deterministic and made here: no file of a real model is needed.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Literal

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, WordLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

TokenizerKind = Literal["bytes", "byte_fallback", "letters"]

BOS, EOS, IM_START, IM_END = "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [BOS, EOS, IM_START, IM_END]
BOS_ID, EOS_ID, IM_START_ID, IM_END_ID = range(4)
EOS_IDS = [EOS_ID, IM_END_ID]
"""What tiny models have as ends of sequence: a document's and a chat turn's."""

DEFAULT_VOCAB_SIZE = 384
LETTERS_VOCAB_SIZE = 16

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + "
    "'<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_UNKNOWN = "<|unknown|>"

_CORPUS = [
    "The draft proposes a few tokens and the target verifies them in one forward.",
    "A wrong guess costs a little time, and it never changes the answer.",
    "When the queue grows, the server answers the oldest request first.",
    "Rain fell on the roof while the old clock in the hall struck nine.",
    "She counted the red boats, the blue boats and the ones without a name.",
    "def add(left, right):\n    return left + right\n\nfor index in range(10):\n    print(add(index, 1))",
    "class Counter:\n    value = 0\n\n    def increment(self):\n        self.value += 1",
    "Zwölf Boxkämpfer jagen Viktor über den großen Deich.",
    "Ça dépend du temps, peut-être demain à l'été prochain.",
    "日本語の文章も、少しだけ含まれています。",
    "Smile 🙂, wave 👋🏽, and count: 1, 2, 3, 45, 678, 9012.",
]


def make_tokenizer(
    directory: Path, *, kind: TokenizerKind = "bytes", vocab_size: int | None = None
) -> PreTrainedTokenizerFast:
    """Writes a tokenizer into ``directory`` and returns it, as transformers loads it.

    - ``bytes``: byte-level BPE, as Llama 3, Qwen and GPT-2 have; characters may be split over tokens.
    - ``byte_fallback``: a space is part of the following word, characters outside the vocabulary become
      byte tokens, the decoder strips one leading space, and encoding puts BOS first, as Llama 2 does.
    - ``letters``: one token per letter of "abcdefghijkl" (anything else reads as "a") and no chat template;
      a vocabulary of 16, for statistics over the whole vocabulary.
    """
    if vocab_size is None:
        vocab_size = LETTERS_VOCAB_SIZE if kind == "letters" else DEFAULT_VOCAB_SIZE
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained(kind, vocab_size)),
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        additional_special_tokens=[IM_START, IM_END],
        clean_up_tokenization_spaces=False,
    )
    if kind != "letters":
        tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)
    return tokenizer


@functools.cache
def _trained(kind: TokenizerKind, vocab_size: int) -> str:
    match kind:
        case "bytes":
            tokenizer = _train_bytes(vocab_size)
        case "byte_fallback":
            tokenizer = _train_byte_fallback(vocab_size)
        case "letters":
            tokenizer = _build_letters(vocab_size)
    actual = tokenizer.get_vocab_size()
    if actual != vocab_size:
        raise ValueError(f"a vocabulary of {vocab_size} cannot be trained, this corpus gives {actual}")
    text: str = tokenizer.to_str()
    return text


def _train_bytes(vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def _train_byte_fallback(vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(BPE(byte_fallback=True, fuse_unk=True, unk_token=_UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL_TOKENS, _UNKNOWN, *byte_tokens],
        limit_alphabet=60,  # the rarer characters have to fall back to bytes
        max_token_length=8,
        show_progress=False,
    )
    tokenizer.train_from_iterator((line for text in _CORPUS for line in text.split("\n")), trainer)
    tokenizer = _without_special_byte_tokens(tokenizer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def _without_special_byte_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """Byte tokens had to be special for the trainer to keep them; text that spells one is plain text."""
    model = tokenizer.model
    plain = Tokenizer(model)
    plain.normalizer = tokenizer.normalizer
    plain.decoder = tokenizer.decoder
    plain.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return plain


def _build_letters(vocab_size: int) -> Tokenizer:
    letters = [chr(ord("a") + index) for index in range(vocab_size - len(SPECIAL_TOKENS))]
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *letters])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return tokenizer
