"""Tiny model directories, made once for a whole test run and shared by all tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from support.draft_heads import fit_output, make_tiny_head
from support.tiny_models import Family, make_tiny_model, noised_clone
from support.tiny_tokenizers import LETTERS_VOCAB_SIZE, TokenizerKind, make_tokenizer

DraftKind = Literal["self", "noised", "unrelated", "head"]

NOISE_SCALE = 0.1
"""Of noised clones: acceptance somewhere between a quarter and three quarters."""
UNRELATED_SEED = 4711


class ModelZoo:
    """Makes a model when it is first asked for. The directories are never written to again."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def target(self, family: Family = "llama") -> Path:
        """A byte-level vocabulary of 384 tokens; greedy output is varied."""
        return self._model(f"{family}-target", family)

    def draft(self, kind: DraftKind, family: Family = "llama") -> Path:
        """A draft of `target`: itself, one that agrees in part, or one that hardly ever does."""
        target = self.target(family)
        if kind == "self":
            return target
        if kind == "unrelated":
            return self._model(f"{family}-unrelated", family, seed=UNRELATED_SEED)
        if kind == "head":
            return self.head(target)
        directory = self._root / f"{family}-noised"
        if not directory.exists():
            noised_clone(target, directory, scale=NOISE_SCALE)
        return directory

    def head(self, target: Path, name: str = "head", *, is_fitted: bool = False, **options: Any) -> Path:
        """A random draft head for a target of this zoo; a fitted one is sometimes right."""
        directory = self._root / f"{target.name}-{name}"
        if not directory.exists():
            make_tiny_head(directory, target, **options)
            if is_fitted:
                fit_output(directory, target)
        return directory

    def deep(self) -> Path:
        """A target with more layers than most."""
        return self._model("deep-target", "llama", layers=7)

    def padded(self, vocab_size: int, *, seed: int) -> Path:
        """A model whose embedding may have more rows than there are tokens."""
        return self._model(f"padded-{vocab_size}-{seed}", "llama", seed=seed, vocab_size=vocab_size)

    def byte_fallback(self) -> Path:
        """A model whose tokenizer has a token for each byte and puts a BOS before every text."""
        return self._model("byte-fallback", "llama", tokenizer="byte_fallback")

    def letters(self, kind: Literal["target", "near", "far", "head"] = "target") -> Path:
        """One layer over 16 tokens, for statistics: a target and drafts close to and far from it."""
        options: dict[str, Any] = {
            "vocab_size": LETTERS_VOCAB_SIZE,
            "hidden_size": 16,
            "layers": 1,
            "tokenizer": "letters",
            "logit_scale": 1.5,
        }
        if kind == "target":
            return self._model("letters-target", "llama", **options)
        if kind == "head":
            # Four tokens that it never proposes must come all the same.
            options = {"layer_ids": (0, 1), "draft_vocab_size": LETTERS_VOCAB_SIZE - 4, "seed": 1}
            return self.head(self.letters(), is_fitted=True, **options)
        if kind == "far":
            return self._model("letters-far", "llama", seed=UNRELATED_SEED, **options)
        directory = self._root / "letters-near"
        if not directory.exists():
            noised_clone(self.letters(), directory, scale=0.3)
        return directory

    def tokenizer(self, kind: TokenizerKind) -> Path:
        """A directory with nothing but a tokenizer."""
        directory = self._root / f"tokenizer-{kind}"
        if not directory.exists():
            make_tokenizer(directory, kind=kind)
        return directory

    def _model(self, name: str, family: Family, **options: Any) -> Path:
        directory = self._root / name
        if not directory.exists():
            make_tiny_model(directory, family, **options)
        return directory
