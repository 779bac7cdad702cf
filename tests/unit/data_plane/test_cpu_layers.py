"""A model with its layers replaced gives the logits of the unchanged one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftline_server.model import cpu_kernels
from draftline_server.model.cpu_decoder_layer import KernelDecoderLayer
from draftline_server.model.cpu_layers import FusedPart
from draftline_server.model.kv_cache import KVCache
from draftline_server.model.loader import load_model
from draftline_server.model.runner import ModelRunner, SequenceInput
from support.tiny_models import FAMILIES, Family, make_tiny_model

BLOCK_SIZE = 8
FUSED: tuple[Family, ...] = ("llama", "qwen2", "qwen3", "mistral")


@pytest.fixture(params=["kernels", "onednn"])
def linear_layers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kinds: ours, and those of machines that cannot have them."""
    if request.param == "onednn":
        monkeypatch.setattr(cpu_kernels, "load", lambda: None)


def _logits(model: PreTrainedModel, *, dtype: torch.dtype) -> Tensor:
    """Of a prompt, then of two sequences together: one token and three."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    cache = KVCache(
        num_layers=config.num_hidden_layers,
        num_blocks=16,
        block_size=BLOCK_SIZE,
        num_kv_heads=getattr(config, "num_key_value_heads", heads),
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    runner = ModelRunner(model, cache, vocab_size=config.vocab_size)
    prompt = [7 * i % 250 for i in range(40)]
    first = runner.forward([SequenceInput(prompt, 0, tuple(range(1, 7)), 3)])
    together = [
        SequenceInput([11], 40, tuple(range(1, 7)), 1),
        SequenceInput([3, 4, 5], 0, (8,), 3),
    ]
    return torch.cat([first, runner.forward(together)])


def _load(directory: Path, dtype: torch.dtype, *, pack: bool) -> PreTrainedModel:
    return load_model(directory, dtype=dtype, device=torch.device("cpu"), pack=pack)


@pytest.mark.usefixtures("linear_layers")
@pytest.mark.parametrize("family", FAMILIES)
def test_replaced_layers_change_nothing(family: Family, tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, family)
    expected = _logits(_load(directory, torch.float32, pack=False), dtype=torch.float32)
    result = _logits(_load(directory, torch.float32, pack=True), dtype=torch.float32)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("linear_layers")
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_weights_give_what_they_give_widened(family: Family, tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, family, dtype=torch.bfloat16)
    model = _load(directory, torch.bfloat16, pack=True)
    expected = _logits(_load(directory, torch.float32, pack=False), dtype=torch.float32)
    result = _logits(model, dtype=next(model.parameters()).dtype)
    # Logits have a standard deviation of 3; an input may be rounded to 8 bits on its way.
    assert (result - expected).abs().max() < 0.35
    assert (result - expected).square().mean().sqrt() < 0.08


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_the_llama_shape_and_no_others_are_fused(
    family: Family, dtype: torch.dtype, tmp_path: Path
) -> None:
    if cpu_kernels.load() is None:
        pytest.skip("this machine cannot have the CPU kernels")
    model = _load(make_tiny_model(tmp_path, family, layers=8, dtype=dtype), dtype, pack=True)
    num_fused = sum(isinstance(module, KernelDecoderLayer) for module in model.modules())
    assert num_fused == (model.config.num_hidden_layers if family in FUSED else 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_layers_compute_together_is_gone_with_the_step(family: Family, tmp_path: Path) -> None:
    model = _load(make_tiny_model(tmp_path, family), torch.float32, pack=True)
    _logits(model, dtype=torch.float32)
    fused = [module.fused for module in model.modules() if isinstance(module, FusedPart)]
    assert not any(linear._outputs or linear._input is not None for linear in fused)
    assert fused or family == "gpt2" or family in FUSED


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ["gelu", "relu", "quick_gelu"])
def test_a_layer_that_differs_in_what_its_parts_do_not_show_is_left_alone(
    tmp_path: Path, activation: str, dtype: torch.dtype
) -> None:
    """The same parts with another activation between them."""
    model = _load(make_tiny_model(tmp_path, "llama", hidden_act=activation, dtype=dtype), dtype, pack=True)
    assert not any(isinstance(module, KernelDecoderLayer) for module in model.modules())


def test_layers_with_a_sliding_window_are_left_alone(tmp_path: Path) -> None:
    directory = make_tiny_model(
        tmp_path, "qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=0
    )
    expected = _logits(_load(directory, torch.float32, pack=False), dtype=torch.float32)
    model = _load(directory, torch.float32, pack=True)
    assert not any(isinstance(module, KernelDecoderLayer) for module in model.modules())
    torch.testing.assert_close(_logits(model, dtype=torch.float32), expected, rtol=1e-4, atol=1e-4)
