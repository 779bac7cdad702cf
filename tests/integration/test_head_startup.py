"""Every fault of a draft head that start-up must find, in one line; and what a sound one is counted as."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftline_server.config import Config, parse_config
from draftline_server.engine import Engine
from draftline_server.engine_factory import build_served_pair
from draftline_server.errors import ModelError, PairMismatchError
from draftline_server.model.startup import InspectedModels, inspect_models
from draftline_server.preflight import render_result, run_checks, summarize
from support.draft_heads import make_tiny_head
from support.engines import generate
from support.prompts import mixed_prompts
from support.reference import ReferenceOf
from support.tiny_models import make_tiny_model
from support.zoo import ModelZoo

KEY = "models.draft_model.path: "
VOCABULARY = 100


@dataclass
class HeadFiles:
    """A target and a head; tests break the head."""

    target: Path
    head: Path

    def config(self, **sections: Any) -> Config:
        models = {"target_model": {"path": str(self.target)}, "draft_model": {"path": str(self.head)}}
        return parse_config(
            {"device": "cpu", "models": models, "inference": {"max_context_length": 256}} | sections
        )

    def inspect(self) -> InspectedModels:
        return inspect_models(self.config())

    def describe(self, **changes: Any) -> None:
        path = self.head / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    def describe_layer(self, **changes: Any) -> None:
        layer = json.loads((self.head / "config.json").read_text())["transformer_layer_config"]
        self.describe(transformer_layer_config=layer | changes)

    def weights(self, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
        path = self.head / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> HeadFiles:
    root = tmp_path_factory.mktemp("healthy-head")
    target = make_tiny_model(root / "target")
    head = make_tiny_head(root / "head", target, draft_vocab_size=VOCABULARY, fc_norm=True, has_output=False)
    return HeadFiles(target, head)


@pytest.fixture
def files(healthy: HeadFiles, tmp_path: Path) -> HeadFiles:
    return HeadFiles(healthy.target, shutil.copytree(healthy.head, tmp_path / "head"))


def d2t(values: dict[str, torch.Tensor], index: int, value: int) -> None:
    values["d2t"][index] = value


FAULTS: dict[str, tuple[Callable[[HeadFiles], object], str]] = {
    "another kind": (lambda f: f.describe(speculators_model_type="mtp"), "mtp is not supported"),
    "no layer": (lambda f: f.describe(transformer_layer_config=None), "transformer_layer_config is missing"),
    "another layer": (lambda f: f.describe_layer(model_type="gpt2"), "model_type gpt2 is not supported"),
    "a list of layers": (lambda f: f.describe_layer(model_type=[]), "model_type [] is not supported"),
    "unknown activation": (lambda f: f.describe_layer(hidden_act="step"), "config.json: there is no 'step'"),
    "no layers": (lambda f: f.describe_layer(num_hidden_layers=0), "num_hidden_layers is 0, at least 1"),
    "nonsense in the layer": (lambda f: f.describe_layer(num_attention_heads="x"), "num_attention_heads"),
    "moving rope": (
        lambda f: f.describe_layer(
            rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
        ),
        "rope_type dynamic",
    ),
    "no vocabulary": (lambda f: f.describe(draft_vocab_size=None), "draft_vocab_size is None"),
    "too large a vocabulary": (lambda f: f.describe(draft_vocab_size=9999), "above vocab_size"),
    "two norms": (lambda f: f.describe(norm_before_fc=True), "exclude each other"),
    "hidden size": (lambda f: f.describe(target_hidden_size=128), "128 numbers, the target's have 64"),
    "vocabulary size": (lambda f: f.describe_layer(vocab_size=400), "400 tokens, the target's has 384"),
    "layers beyond": (
        lambda f: f.describe(eagle_aux_hidden_state_layer_ids=[0, 1, 3]),
        "[0, 1, 3] are not layers in rising order of a target that has 2",
    ),
    "layers twice": (lambda f: f.describe(eagle_aux_hidden_state_layer_ids=[1, 1, 2]), "[1, 1, 2]"),
    "layers in disorder": (lambda f: f.describe(eagle_aux_hidden_state_layer_ids=[2, 1, 0]), "[2, 1, 0]"),
    "no list of layers": (
        lambda f: f.describe(eagle_aux_hidden_state_layer_ids="all"),
        "not a list of layers",
    ),
    "another target": (
        lambda f: f.describe(
            speculators_config={"verifier": {"name_or_path": "x", "architectures": ["Qwen3ForCausalLM"]}}
        ),
        "made for a Qwen3ForCausalLM (speculators_config.verifier.architectures), the target is a Llama",
    ),
    "no fc": (lambda f: f.weights(lambda t: t.pop("fc.weight")), "lacks tensor fc.weight"),
    "narrow fc": (
        lambda f: f.weights(lambda t: t.update({"fc.weight": torch.zeros(64, 128)})),
        "tensor fc.weight has shape [64, 128], config.json asks for [64, 192]",
    ),
    "no map": (lambda f: f.weights(lambda t: t.pop("d2t")), "lacks tensor d2t"),
    "short map": (lambda f: f.weights(lambda t: t.update(d2t=t["d2t"][:50])), "d2t has shape [50]"),
    "foreign map": (
        lambda f: f.weights(lambda t: t.update(t2d=torch.zeros(500, dtype=torch.bool))),
        "t2d has shape [500]",
    ),
    "map beyond": (lambda f: f.weights(lambda t: d2t(t, 99, 1000)), "names tokens beyond the 384"),
    "map twice": (lambda f: f.weights(lambda t: d2t(t, 1, int(t["d2t"][0]) - 1)), "names a token twice"),
    "maps apart": (lambda f: f.weights(lambda t: t["t2d"].logical_not_()), "name different tokens"),
    "cut": (
        lambda f: (f.head / "model.safetensors").write_bytes(
            (f.head / "model.safetensors").read_bytes()[:-9]
        ),
        "truncated",
    ),
    "no weights": (lambda f: (f.head / "model.safetensors").unlink(), "no weights"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_line_that_names_the_key(files: HeadFiles, name: str) -> None:
    spoil, message = FAULTS[name]
    spoil(files)
    with pytest.raises(ModelError) as caught:
        files.inspect()
    text = str(caught.value)
    assert text.startswith(KEY)
    assert message in text
    assert "\n" not in text


@pytest.mark.parametrize(
    "name", ["hidden size", "vocabulary size", "layers beyond", "another target", "map beyond"]
)
def test_a_head_of_another_target_is_a_pair_that_does_not_fit(files: HeadFiles, name: str) -> None:
    FAULTS[name][0](files)
    with pytest.raises(PairMismatchError):
        files.inspect()


def test_a_sound_head_is_planned_for_and_serves(files: HeadFiles, reference_of: ReferenceOf) -> None:
    inspected = files.inspect()
    assert inspected.draft is not None
    assert inspected.plan.draft is not None
    assert inspected.draft.facts.architecture == "Eagle3DraftHead"
    layer_bytes = 2 * 2 * 16 * 4
    kept_bytes = 3 * 64 * 4 / 16
    assert inspected.plan.draft.kv_bytes_per_token == layer_bytes + kept_bytes
    assert inspected.plan.captured_bytes > 0
    pair = build_served_pair(files.config(), inspected)
    assert isinstance(pair.engine, Engine)
    pair.engine.warm_up()
    prompts = mixed_prompts(4)
    for prompt, completion in zip(prompts, generate(pair.engine, prompts, max_tokens=16), strict=True):
        assert completion.token_ids == reference_of(files.target).greedy(prompt, 16)


def test_a_head_counts_in_the_digest_of_the_pair(files: HeadFiles) -> None:
    before = files.inspect().pair_digest
    files.weights(lambda t: t["fc.weight"].mul_(2.0))
    assert files.inspect().pair_digest != before


def test_preflight_tells_of_a_head(files: HeadFiles) -> None:
    findings = run_checks(files.config, None)
    assert findings.fault is None, findings.fault
    result = json.loads(render_result(findings))
    assert result["draft"]["architecture"] == "Eagle3DraftHead"
    assert any(line.startswith("draft: Eagle3DraftHead") for line in summarize(findings))
    assert any(line.startswith("hidden states for draft") for line in summarize(findings))


def test_bfloat16_weights_turn_by_the_angles_of_float32(healthy: HeadFiles, zoo: ModelZoo) -> None:
    from draftline_server.config import ModelConfig
    from draftline_server.model.head_checkpoint import load_head
    from draftline_server.model.loader import load_model
    from draftline_server.model.startup import inspect_head, inspect_model

    cpu = torch.device("cpu")
    inspected = inspect_model(ModelConfig(path=healthy.target), role="target", where=cpu)
    head = inspect_head(ModelConfig(path=healthy.head), inspected, where=cpu)
    for pack in (True, False):
        target = load_model(healthy.target, dtype=torch.bfloat16, device=cpu, pack=pack)
        loaded = load_head(
            head.checkpoint,
            head.head,
            target=target,
            target_weights=inspected.weights,
            dtype=torch.bfloat16,
            device=cpu,
            pack=pack,
        )
        size = 16
        exact = 10000.0 ** (-torch.arange(0, size, 2).float() / size)
        for rotary in (loaded.head.rotary_emb, target.model.rotary_emb):
            torch.testing.assert_close(rotary.inv_freq, exact, rtol=1e-6, atol=0.0)


def test_a_pickled_head_is_refused_with_the_command_that_converts_it(files: HeadFiles) -> None:
    weights = files.head / "model.safetensors"
    torch.save(load_file(weights), files.head / "pytorch_model.bin")
    before = load_file(weights)
    weights.unlink()
    with pytest.raises(ModelError, match=r"only pytorch_model\.bin") as refusal:
        files.inspect()
    command = str(refusal.value).partition('python -c "')[2].removesuffix('"')
    subprocess.run([sys.executable, "-c", command], cwd=files.head, check=True)
    files.inspect()
    after = load_file(weights)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
