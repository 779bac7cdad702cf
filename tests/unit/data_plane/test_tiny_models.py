"""Tiny models are deterministic, varied and as near to each other as asked for: other tests rely on it."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from support.tiny_models import FAMILIES, Family, make_tiny_model, noised_clone
from support.tiny_tokenizers import EOS_IDS, TokenizerKind, make_tokenizer

PROMPT = torch.arange(40, 60).unsqueeze(0)


def load(directory: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    return model


def greedy(model: PreTrainedModel, *, num_tokens: int = 48) -> list[int]:
    output = model.generate(  # type: ignore[operator]
        PROMPT,
        attention_mask=torch.ones_like(PROMPT),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
    )
    tokens: list[int] = output[0, PROMPT.shape[1] :].tolist()
    return tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_varied_and_reads_the_whole_prompt(tmp_path: Path, family: Family) -> None:
    model = load(make_tiny_model(tmp_path, family))
    assert len(set(greedy(model))) >= 8
    changed = PROMPT.clone()
    changed[0, 0] += 1
    difference = model(PROMPT).logits[0, -1] - model(changed).logits[0, -1]
    assert difference.abs().max() > 0.01


def test_a_model_is_determined_by_its_arguments(tmp_path: Path) -> None:
    first, again, other = (
        (make_tiny_model(tmp_path / name, seed=seed) / "model.safetensors").read_bytes()
        for name, seed in (("first", 1), ("again", 1), ("other", 2))
    )
    assert first == again
    assert first != other


def test_a_clone_agrees_less_the_more_noise_it_has(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source")
    tokens = torch.tensor([greedy(load(source))])
    choices = load(source)(tokens).logits.argmax(-1)
    agreement = [
        (load(noised_clone(source, tmp_path / str(scale), scale=scale))(tokens).logits.argmax(-1) == choices)
        .float()
        .mean()
        .item()
        for scale in (0.0, 0.05, 1.0)
    ]
    assert agreement[0] == 1.0
    assert 0.4 < agreement[1] < 1.0
    assert agreement[2] < 0.2


@pytest.mark.parametrize("kind", ["bytes", "byte_fallback"])
def test_tokenizers_round_trip_any_text(tmp_path: Path, kind: TokenizerKind) -> None:
    make_tokenizer(tmp_path, kind=kind)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("Hello 🙂 world, größer 日本\n  x = 1", " lead", "<0x41>"):
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert EOS_IDS[1] in tokenizer.encode(str(chat))


def test_the_letters_tokenizer_has_one_token_per_letter(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, kind="letters")
    assert len(tokenizer) == 16
    assert tokenizer.encode("abcl") == [4, 5, 6, 15]
