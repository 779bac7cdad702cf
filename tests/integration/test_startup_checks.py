"""Every fault of a model pair that start-up must find, before a weight is loaded and in one line.

The table is of changes to a healthy pair: a target in three shards and an unsharded draft.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftline_server.config import parse_config
from draftline_server.core.digest import MANIFEST_NAME, write_manifest
from draftline_server.engine_factory import build_served_pair
from draftline_server.errors import ConfigError, ModelError, ResourceError, StartupError
from draftline_server.model import device
from draftline_server.model.device import DeviceMemory
from draftline_server.model.startup import InspectedModels, inspect_models
from support.tiny_models import FAMILIES, Family, make_tiny_model
from support.tiny_tokenizers import EOS_IDS, make_tokenizer
from support.zoo import ModelZoo

TARGET_KEY = "models.target_model.path: "
DRAFT_KEY = "models.draft_model.path: "
CONTEXT = 512
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"


@dataclass
class Pair:
    """A healthy pair of directories and the configuration that serves it; tests break either."""

    target: Path
    draft: Path
    document: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.document = {
            "device": "cpu",
            "models": {"target_model": {"path": str(self.target)}, "draft_model": {"path": str(self.draft)}},
            "inference": {"max_context_length": CONTEXT},
        }

    def inspect(self) -> InspectedModels:
        return inspect_models(parse_config(self.document))

    def set(self, section: str, **values: object) -> None:
        self.document.setdefault(section, {}).update(values)

    def shard(self, number: int) -> Path:
        return sorted(self.target.glob("model-*.safetensors"))[number - 1]


@pytest.fixture(scope="module")
def healthy(zoo: ModelZoo, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("healthy")
    pair = Pair(root / "target", root / "draft")
    make_tiny_model(pair.target, "llama", max_shard_size="220KB")
    make_tiny_model(pair.draft, "llama", layers=1, seed=1, vocab_size=400)
    assert pair.shard(3) == sorted(pair.target.glob("model-*.safetensors"))[-1]
    return pair


@pytest.fixture
def pair(healthy: Pair, tmp_path: Path) -> Pair:
    copy = Pair(tmp_path / "target", tmp_path / "draft")
    shutil.copytree(healthy.target, copy.target)
    shutil.copytree(healthy.draft, copy.draft)
    return copy


def steps(*actions: Callable[[Pair], object]) -> Callable[[Pair], object]:
    return lambda pair: [action(pair) for action in actions]


def edit_json(path: Path, **values: object) -> None:
    document = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not None}))


def edit_index(pair: Pair, change: Callable[[dict[str, str]], object]) -> None:
    path = pair.target / INDEX
    document = json.loads(path.read_text())
    change(document["weight_map"])
    path.write_text(json.dumps(document))


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def edit_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrites the header and leaves the weights alone."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + content[8 + length :])


def first_tensor(header: dict[str, Any]) -> dict[str, Any]:
    tensor: dict[str, Any] = next(value for key, value in header.items() if key != "__metadata__")
    return tensor


def truncate(path: Path, size: int) -> None:
    """Cuts to `size` bytes, or that many from the end where it is negative."""
    path.write_bytes(path.read_bytes()[:size])


def config_of(pair: Pair, **values: object) -> None:
    edit_json(pair.target / "config.json", **values)


def retrain_draft_tokenizer(pair: Pair) -> None:
    make_tiny_model(pair.draft, "llama", layers=1, vocab_size=400, tokenizer_vocab_size=380)


def swap_tokens(pair: Pair) -> None:
    """Two tokens change ids, so that sizes and sets of tokens stay equal."""
    path = pair.draft / "tokenizer.json"
    document = json.loads(path.read_text())
    vocabulary = document["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(document))


def reverse_merges(pair: Pair) -> None:
    path = pair.draft / "tokenizer.json"
    document = json.loads(path.read_text())
    document["model"]["merges"].reverse()
    path.write_text(json.dumps(document))


def split_off_head(pair: Pair) -> None:
    """Into a second file beside `WEIGHTS`, of which transformers would never know."""
    tensors = load_file(pair.draft / WEIGHTS)
    save_file({"lm_head.weight": tensors.pop("lm_head.weight")}, pair.draft / "head.safetensors")
    save_file(tensors, pair.draft / WEIGHTS, metadata={"format": "pt"})
    weight_map = dict.fromkeys(tensors, WEIGHTS) | {"lm_head.weight": "head.safetensors"}
    (pair.draft / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def no_tokens(pair: Pair) -> None:
    path = pair.target / "tokenizer.json"
    document = json.loads(path.read_text())
    document["model"] |= {"vocab": {}, "merges": []}
    path.write_text(json.dumps(document | {"added_tokens": [], "post_processor": None}))
    generic = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (pair.target / "tokenizer_config.json").write_text(json.dumps(generic))


Fault = tuple[str, Callable[[Pair], object], type[StartupError], str]

# fmt: off
DIRECTORY_FAULTS: list[Fault] = [
    ("target-missing", lambda p: shutil.rmtree(p.target), ModelError,
     f"{TARGET_KEY}…/target: no such directory"),
    ("draft-missing", lambda p: shutil.rmtree(p.draft), ModelError, f"{DRAFT_KEY}…/draft: no such directory"),
    ("target-is-a-file", steps(lambda p: shutil.rmtree(p.target), lambda p: p.target.write_text("")),
     ModelError,
     f"{TARGET_KEY}…/target: not a directory"),
    ("target-is-empty", steps(lambda p: shutil.rmtree(p.target), lambda p: p.target.mkdir()), ModelError,
     f"{TARGET_KEY}…/target/config.json: missing"),
    ("config-cut", lambda p: truncate(p.draft / "config.json", 100), ModelError,
     f"{DRAFT_KEY}…/draft/config.json: not valid JSON: "),
    ("config-is-a-list", lambda p: (p.target / "config.json").write_text("[]"), ModelError,
     f"{TARGET_KEY}…/target/config.json: not a JSON object"),
    ("config-contradicts-itself", lambda p: config_of(p, hidden_size=66), ModelError,
     f"{TARGET_KEY}…/target/config.json: The hidden size (66)"),
    ("config-has-a-wrong-type", lambda p: config_of(p, num_hidden_layers="two"), ModelError,
     f"{TARGET_KEY}…/target/config.json: "),
    ("config-nested-without-end", lambda p: (p.target / "config.json").write_text("[" * 100_000), ModelError,
     f"{TARGET_KEY}…/target/config.json: not valid JSON"),
    ("name-too-long", lambda p: p.document["models"]["target_model"].update(path="x" * 5000), ModelError,
     "cannot be read: File name too long"),
    ("chat-template-cut", lambda p: (p.target / "chat_template.jinja").write_text("{% for message in"),
     ModelError, f"{TARGET_KEY}…/target: its chat template cannot be used: "),
    ("adapter", lambda p: (p.target / "adapter_config.json").write_text("{}"), ModelError,
     "adapter_config.json: adapters are not supported"),
    ("generation-config-cut", lambda p: truncate(p.target / "generation_config.json", 10), ModelError,
     f"{TARGET_KEY}…/target/generation_config.json: not valid JSON"),
    ("eos-beyond-the-vocabulary",
     lambda p: edit_json(p.target / "generation_config.json", eos_token_id=[1, 384]), ModelError,
     "generation_config.json: eos_token_id 384 is not in [0, 384)"),
    ("no-tokenizer", lambda p: (p.draft / "tokenizer.json").unlink(), ModelError,
     f"{DRAFT_KEY}…/draft: no tokenizer: none of tokenizer.json, "),
    ("tokenizer-class-is-a-list",
     lambda p: edit_json(p.target / "tokenizer_config.json", tokenizer_class=["x"]), ModelError,
     f"{TARGET_KEY}…/target: its tokenizer cannot be loaded: "),
    ("tokenizer-without-tokens", no_tokens, ModelError,
     f"{TARGET_KEY}…/target: its tokenizer has no tokens"),
    ("tokenizer-cut", lambda p: truncate(p.target / "tokenizer.json", 1000), ModelError,
     f"{TARGET_KEY}…/target/tokenizer.json: not valid JSON"),
]

WEIGHT_FAULTS: list[Fault] = [
    ("no-weights", lambda p: (p.draft / WEIGHTS).unlink(), ModelError,
     f"{DRAFT_KEY}…/draft: no weights: neither {WEIGHTS} nor {INDEX} is there"),
    ("link-to-nowhere", steps(lambda p: (p.draft / WEIGHTS).unlink(),
                              lambda p: (p.draft / WEIGHTS).symlink_to("nowhere")), ModelError,
     f"{DRAFT_KEY}…/draft/{WEIGHTS}: cannot be read: No such file"),
    ("only-gguf", lambda p: (p.draft / WEIGHTS).rename(p.draft / "model.gguf"), ModelError,
     "only model.gguf; convert it to safetensors first"),
    ("only-pickle", lambda p: (p.draft / WEIGHTS).rename(p.draft / "pytorch_model.bin"), ModelError,
     "only pytorch_model.bin; convert a single one: python -c "),
    ("shards-without-index", lambda p: (p.target / INDEX).unlink(), ModelError,
     f"no {WEIGHTS} and no {INDEX}, only model-00001-of-00003.safetensors, "),
    ("shard-missing", lambda p: p.shard(2).unlink(), ModelError,
     f"{TARGET_KEY}…/target/{INDEX}: names 1 missing file: model-00002-of-00003.safetensors"),
    ("two-shards-missing", steps(lambda p: p.shard(3).unlink(), lambda p: p.shard(1).unlink()), ModelError,
     "names 2 missing files: model-00001-of-00003.safetensors, model-00003-of-00003.safetensors"),
    ("draft-shard-missing", steps(lambda p: (p.draft / INDEX).write_text(json.dumps({"weight_map": {
        "model.norm.weight": "model-00001-of-00002.safetensors",
        "lm_head.weight": "model-00002-of-00002.safetensors"}})),
        lambda p: (p.draft / WEIGHTS).rename(p.draft / "model-00001-of-00002.safetensors")), ModelError,
     f"{DRAFT_KEY}…/draft/{INDEX}: names 1 missing file: model-00002-of-00002.safetensors"),
    ("index-beside-whole-weights", lambda p: (p.draft / INDEX).write_text(
        json.dumps({"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}})), ModelError,
     f"{DRAFT_KEY}…/draft/{INDEX}: names other files than {WEIGHTS}, which is there, too; delete the stale "),
    ("index-of-whole-weights-and-another-file", split_off_head, ModelError,
     f"{DRAFT_KEY}…/draft/{INDEX}: names other files than {WEIGHTS}, which is there, too; "),
    ("weights-of-another-name", steps(
        lambda p: shutil.copy(p.draft / WEIGHTS, p.draft / "other.safetensors"),
        lambda p: edit_json(p.draft / "config.json", transformers_weights="other.safetensors")), ModelError,
     f"{DRAFT_KEY}…/draft/config.json: transformers_weights is not supported"),
    ("index-names-an-absent-tensor",
     lambda p: edit_index(p, lambda m: m.update({"model.layers.7.x": p.shard(2).name})), ModelError,
     f"{INDEX}: names 1 tensor that model-00002-of-00003.safetensors lacks: model.layers.7.x"),
    ("index-stale",
     lambda p: edit_index(p, lambda m: m.pop("model.norm.weight")), ModelError,
     f"{INDEX}: stale: model-00002-of-00003.safetensors holds 1 tensor that the index does not place there: "
     "model.norm.weight"),
    ("index-places-a-tensor-elsewhere",
     lambda p: edit_index(p, lambda m: m.update({"model.norm.weight": p.shard(1).name})), ModelError,
     f"{INDEX}: names 1 tensor that model-00001-of-00003.safetensors lacks: model.norm.weight"),
    ("index-without-a-map", lambda p: (p.target / INDEX).write_text("{}"), ModelError,
     f"{INDEX}: weight_map is missing or empty"),
    ("index-leaves-the-directory",
     lambda p: edit_index(p, lambda m: m.update({"model.norm.weight": "../x.safetensors"})), ModelError,
     "'../x.safetensors', given for tensor model.norm.weight, is not a file name"),
    ("index-cut", lambda p: truncate(p.target / INDEX, 50), ModelError, f"{INDEX}: not valid JSON"),
    ("tensor-missing",
     lambda p: edit_tensors(p.draft / WEIGHTS, lambda t: t.pop("model.norm.weight")), ModelError,
     f"{DRAFT_KEY}…/draft/{WEIGHTS}: lacks 1 tensor of the model: model.norm.weight"),
    ("untied-head-missing",
     lambda p: edit_tensors(p.draft / WEIGHTS, lambda t: t.pop("lm_head.weight")), ModelError,
     f"{WEIGHTS}: lacks 1 tensor of the model: lm_head.weight"),
    ("fewer-layers-than-the-config-says", lambda p: config_of(p, num_hidden_layers=3), ModelError,
     f"{TARGET_KEY}…/target/{INDEX}: lacks 9 tensors of the model: model.layers.2.self_attn.q_proj.weight, "),
    ("wrong-shape", lambda p: config_of(p, intermediate_size=130), ModelError,
     f"{INDEX}: tensor model.layers.0.mlp.gate_proj.weight has shape [128, 64], config.json "
     "asks for [130, 64]"),
    ("empty-file", lambda p: truncate(p.draft / WEIGHTS, 0), ModelError,
     f"{DRAFT_KEY}…/draft/{WEIGHTS}: truncated: 0 bytes are no safetensors file"),
    ("cut-in-the-header", lambda p: truncate(p.draft / WEIGHTS, 100), ModelError,
     f"{WEIGHTS}: truncated: its header alone has "),
    ("cut-in-the-weights", lambda p: truncate(p.shard(2), -1), ModelError,
     f"{TARGET_KEY}…/target/model-00002-of-00003.safetensors: truncated: "),
    ("bytes-at-the-end", lambda p: (p.draft / WEIGHTS).write_bytes((p.draft / WEIGHTS).read_bytes() + b"xyz"),
     ModelError,
     f"{WEIGHTS}: damaged: 3 bytes follow the last tensor"),
    ("not-safetensors", lambda p: (p.draft / WEIGHTS).write_bytes(b"\xff" * 64), ModelError,
     f"{WEIGHTS}: not a safetensors file"),
    ("git-lfs-pointer", lambda p: (p.draft / WEIGHTS).write_text("version https://git-lfs.example/spec/v1\n"),
     ModelError, f"{WEIGHTS}: a git-lfs pointer instead of the file itself"),
    ("header-not-json", lambda p: (p.draft / WEIGHTS).write_bytes((9).to_bytes(8, "little") + b"{not json"),
     ModelError, f"{WEIGHTS}: damaged: its header is not valid JSON"),
    ("header-without-offsets",
     lambda p: edit_header(p.draft / WEIGHTS, lambda h: first_tensor(h).pop("data_offsets")), ModelError,
     f"{WEIGHTS}: damaged: the header's entry of tensor "),
    ("endless-shape",
     lambda p: edit_header(p.draft / WEIGHTS, lambda h: first_tensor(h).update(shape=[math.inf])), ModelError,
     f"{WEIGHTS}: damaged: the header's entry of tensor "),
    ("shape-does-not-fit-its-bytes",
     lambda p: edit_header(p.draft / WEIGHTS, lambda h: first_tensor(h).update(shape=[3])), ModelError,
     "which does not fit F32 of shape [3]"),
    ("tensors-overlap",
     lambda p: edit_header(p.draft / WEIGHTS, lambda h: [
         v.update(data_offsets=[0, v["data_offsets"][1] - v["data_offsets"][0]])
         for k, v in h.items() if k != "__metadata__"]), ModelError,
     f"{WEIGHTS}: damaged: tensor "),
    ("quantized-weights",
     lambda p: edit_tensors(p.draft / WEIGHTS, lambda t: t.update(
         {"lm_head.weight": t["lm_head.weight"].to(torch.int8)})), ModelError,
     "tensor lm_head.weight is I8; quantized weights are not supported"),
]

ARCHITECTURE_FAULTS: list[Fault] = [
    ("no-model-type", lambda p: config_of(p, model_type=None), ModelError,
     f"{TARGET_KEY}…/target/config.json: model_type is missing"),
    ("unknown", lambda p: config_of(p, model_type="llama9"), ModelError,
     "model_type llama9 cannot be served: the engine does not know it (it knows llama, qwen2, "),
    *((f"refused-{name}", lambda p, name=name: config_of(p, model_type=name), ModelError,
       f"config.json: model_type {name} cannot be served: {reason}")
      for name, reason in [
          ("mamba2", "it has recurrent"), ("jamba", "it has recurrent"), ("qwen3_next", "it has recurrent"),
          ("mixtral", "mixtures of experts"), ("gpt_oss", "attention sinks"), ("bloom", "ALiBi"),
          ("gemma3", "it reads images, too; only the text model")]),
    ("encoder-decoder", lambda p: config_of(p, model_type="t5", is_encoder_decoder=True), ModelError,
     "t5 has an encoder; only decoder-only models are supported"),
    ("classifier", lambda p: config_of(p, architectures=["LlamaForSequenceClassification"]), ModelError,
     "architectures is ['LlamaForSequenceClassification'], a served llama is LlamaForCausalLM"),
    ("quantized", lambda p: config_of(p, quantization_config={"quant_method": "gptq"}), ModelError,
     "its weights are quantized (quantization_config), which is not supported"),
    ("no-layers", lambda p: config_of(p, num_hidden_layers=0), ModelError,
     "config.json: num_hidden_layers is 0, at least 1 is needed"),
    ("no-context", lambda p: config_of(p, max_position_embeddings=-5), ModelError,
     "config.json: max_position_embeddings is -5, at least 2 is needed"),
    ("unknown-activation", lambda p: config_of(p, hidden_act="step"), ModelError,
     f"{TARGET_KEY}…/target/config.json: there is no 'step'"),
    ("batch-dependent-rope",
     lambda p: config_of(p, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
     ModelError, "rope_type dynamic is not supported: it changes with the longest sequence of a batch"),
    ("batch-dependent-rope-in-long-contexts",
     lambda p: config_of(p, rope_parameters={
         "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "rope_theta": 1e4,
         "original_max_position_embeddings": 128}),
     ModelError, "rope_type longrope is not supported: it changes with the longest sequence of a batch"),
]

PAIR_FAULTS: list[Fault] = [
    ("vocabulary-size", retrain_draft_tokenizer, ModelError,
     f"{DRAFT_KEY}its vocabulary of 380 tokens differs from the target's of 384 in 4 ids; the "
     "first, 380, is "),
    ("two-tokens-swapped", swap_tokens, ModelError,
     f"{DRAFT_KEY}its vocabulary of 384 tokens differs from the target's of 384 in 2 ids; the first, "),
    ("other-merges", reverse_merges, ModelError,
     f"{DRAFT_KEY}its tokenizer has the target's 384 tokens, but cuts '"),
    ("ids-without-a-row", lambda p: make_tiny_model(p.draft, "llama", vocab_size=380), ModelError,
     f"{DRAFT_KEY}its tokenizer has ids up to 383, but the model only 380 rows (vocab_size in config.json)"),
    ("draft-context-shorter", lambda p: edit_json(p.draft / "config.json", max_position_embeddings=256),
     ConfigError, "inference.max_context_length: 512 is above the draft model's 256; set "
     "inference.max_context_length to 256 or less"),
    ("draft-context-shorter-than-the-targets-own",
     steps(lambda p: edit_json(p.draft / "config.json", max_position_embeddings=256),
           lambda p: p.set("inference", max_context_length=None)),
     ConfigError, "inference.max_context_length: 1024, the target model's own, is above the draft model's "
     "256; "),
    ("context-longer-than-the-targets", lambda p: p.set("inference", max_context_length=1025), ConfigError,
     "inference.max_context_length: 1025 is above the target model's 1024 (max_position_embeddings)"),
    ("digest", lambda p: p.set("models", expected_pair_digest=f"sha256:{'0' * 64}"), ModelError,
     f"models.expected_pair_digest: sha256:{'0' * 64} is expected, the files give sha256:"),
    ("manifest", steps(lambda p: write_manifest(p.draft), lambda p: (p.draft / "new.json").write_text("{}")),
     ModelError,
     f"{DRAFT_KEY}…/draft/new.json: not listed in {MANIFEST_NAME}"),
]

DEVICE_FAULTS: list[Fault] = [
    ("float16-on-a-cpu", lambda p: p.document["models"]["draft_model"].update(dtype="float16"), ResourceError,
     "models.draft_model.dtype: float16 cannot be used: CPUs lack it; set float32 or bfloat16"),
    ("float16-checkpoint-on-a-cpu", lambda p: config_of(p, dtype="float16"), ResourceError,
     "models.target_model.dtype: float16 (the checkpoint's) cannot be used: CPUs lack it"),
    ("no-gpu", lambda p: p.document.update(device="cuda"), ResourceError,
     "device: cuda is asked for, but this installation of torch "),
    ("pool-too-small", lambda p: p.set("inference", kv_cache_memory="16KiB"), ResourceError,
     "inference.kv_cache_memory: the pool of 16.00 KiB is too small, one request of 512 tokens needs 384.00 "
     "KiB; raise it or lower inference.max_context_length"),
    ("pool-too-large", lambda p: p.set("inference", kv_cache_memory="8GiB"), ResourceError,
     "inference.kv_cache_memory: 8.00 GiB do not fit; "),
]
# fmt: on
FAULTS = DIRECTORY_FAULTS + WEIGHT_FAULTS + ARCHITECTURE_FAULTS + PAIR_FAULTS + DEVICE_FAULTS


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container of 4 GiB, without a GPU, whatever runs the tests."""
    monkeypatch.setattr(device, "read_memory", lambda _: DeviceMemory(2**32, 2**32, "the container's limit"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(
    ("break_it", "kind", "message"), [pytest.param(*fault, id=name) for name, *fault in FAULTS]
)
def test_a_fault_is_found_before_anything_is_loaded(
    pair: Pair, break_it: Callable[[Pair], object], kind: type[StartupError], message: str
) -> None:
    break_it(pair)
    with pytest.raises(kind) as caught:
        pair.inspect()
    text = str(caught.value).replace(str(pair.target.parent), "…")
    assert message in text
    assert text.startswith(("models", "inference.", "device: ")), text
    assert "\n" not in text


def test_a_healthy_pair_passes_and_its_plan_is_complete(pair: Pair) -> None:
    models = pair.inspect()
    assert models.draft is not None
    assert (models.target.facts.vocab_size, models.draft.facts.vocab_size) == (384, 400)
    assert models.target.tokenizer.vocab_size == 384
    assert models.methods == ("ngram", "draft_model")
    assert models.max_context_length == CONTEXT
    assert models.target.facts.eos_token_ids == tuple(EOS_IDS)
    assert models.target.facts.num_parameters == sum(
        tensor.numel() for path in pair.target.glob("*.safetensors") for tensor in load_file(path).values()
    )
    assert models.plan.target.weight_bytes == 4 * models.target.facts.num_parameters
    assert models.plan.capacity_tokens >= CONTEXT
    assert models.notes() == []


def test_the_pair_digest_is_accepted_when_it_is_the_expected_one(pair: Pair) -> None:
    digest = pair.inspect().pair_digest
    pair.set("models", expected_pair_digest=digest)
    assert pair.inspect().pair_digest == digest
    write_manifest(pair.target)
    assert pair.inspect().pair_digest == digest
    pair.set("speculative_decoding", num_speculative_tokens=4)
    with pytest.raises(ModelError, match=r"^models\.expected_pair_digest: "):
        pair.inspect()


def test_stray_files_are_ignored_and_reported(pair: Pair) -> None:
    (pair.target / "consolidated.safetensors").write_bytes(b"anything")
    assert pair.inspect().notes() == [
        "models.target_model.path: ignored consolidated.safetensors, which is no part of the checkpoint"
    ]


def test_tensors_that_the_model_does_not_have_are_ignored_and_reported(pair: Pair) -> None:
    config_of(pair, num_hidden_layers=1)
    edit_tensors(pair.draft / WEIGHTS, lambda t: t.update({"extra": torch.zeros(3)}))
    assert pair.inspect().notes() == [
        "models.target_model.path: ignored 9 tensors that the model does not have: "
        "model.layers.1.input_layernorm.weight, model.layers.1.mlp.down_proj.weight, "
        "model.layers.1.mlp.gate_proj.weight, ...",
        "models.draft_model.path: ignored 1 tensor that the model does not have: extra",
    ]


def test_what_transformers_warns_of_is_in_the_log(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    config_of(pair, bos_token_id=5000)
    with caplog.at_level(logging.WARNING):
        pair.inspect()
    assert any("bos_token_id" in record.getMessage() for record in caplog.records)


def test_what_config_json_says_of_outputs_changes_nothing(zoo: ModelZoo, tmp_path: Path) -> None:
    directory = shutil.copytree(zoo.target(), tmp_path / "target")
    settings = {"return_dict": False, "output_attentions": True, "output_hidden_states": True}
    edit_json(directory / "config.json", **settings)
    config = parse_config({"device": "cpu", "models": {"target_model": {"path": str(directory)}}})
    build_served_pair(config, inspect_models(config)).engine.warm_up()


@pytest.mark.parametrize(
    "value", [{"num_return_sequences": 2}, {"max_new_tokens": 0}, {"early_stopping": "yes"}], ids=str
)
def test_what_generation_config_json_says_beside_its_end_tokens_is_for_others(
    pair: Pair, value: dict[str, Any]
) -> None:
    edit_json(pair.target / "generation_config.json", **value)
    config = parse_config(pair.document)
    inspected = inspect_models(config)
    assert inspected.target.facts.eos_token_ids == tuple(EOS_IDS)
    build_served_pair(config, inspected).engine.warm_up()


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_tensor_that_only_the_loader_misses_is_not_made_up(pair: Pair, role: str) -> None:
    config = parse_config(pair.document)
    inspected = inspect_models(config)
    path = pair.shard(2) if role == "target" else pair.draft / WEIGHTS
    edit_tensors(path, lambda t: t.pop("model.norm.weight"))
    with pytest.raises(ModelError, match=rf"^models\.{role}_model\.path: .*model\.norm\.weight") as caught:
        build_served_pair(config, inspected)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_weights_that_are_no_numbers_are_found_in_the_warm_up(pair: Pair, role: str, value: float) -> None:
    path = pair.shard(1) if role == "target" else pair.draft / WEIGHTS
    edit_tensors(path, lambda t: t[min(t)].fill_(value))
    config = parse_config(pair.document)
    engine = build_served_pair(config, inspect_models(config)).engine
    with pytest.raises(ModelError, match=rf"^models\.{role}_model: its first logits are no numbers"):
        engine.warm_up()


@pytest.mark.parametrize("missing", ["model.", "lm_head.weight"])
def test_a_tied_head_and_a_headless_checkpoint_lack_nothing(tmp_path: Path, missing: str) -> None:
    """Weights saved from the base model have no prefix; a tied head need not be stored."""
    directory = make_tiny_model(tmp_path / "target", "qwen2")
    path = directory / WEIGHTS
    tensors = {
        name.removeprefix(missing): value for name, value in load_file(path).items() if name != missing
    }
    save_file(tensors, path, metadata={"format": "pt"})
    document = {"device": "cpu", "models": {"target_model": {"path": str(directory)}}}
    models = inspect_models(parse_config(document))
    assert models.draft is None
    assert models.methods == ("ngram",)


@pytest.mark.parametrize(
    "speculation", [{"enabled": False}, {"num_speculative_tokens": 0}, {"methods": ["ngram"]}]
)
def test_a_draft_model_that_is_never_run_takes_no_memory(pair: Pair, speculation: dict[str, Any]) -> None:
    pair.set("speculative_decoding", **speculation)
    models = pair.inspect()
    assert models.draft is not None
    assert models.plan.draft is None
    assert "draft_model" not in models.methods


@pytest.mark.parametrize("family", FAMILIES)
def test_every_supported_family_passes_as_its_own_draft(zoo: ModelZoo, family: Family) -> None:
    directory = str(zoo.target(family))
    models = {"target_model": {"path": directory}, "draft_model": {"path": directory, "dtype": "bfloat16"}}
    inspected = inspect_models(parse_config({"device": "cpu", "models": models}))
    assert inspected.draft is not None
    assert inspected.target.dtype is torch.float32
    assert inspected.draft.dtype is torch.bfloat16
    facts = inspected.target.facts
    assert len(facts.sliding_windows) == facts.num_layers == 2
    assert facts.kv_bytes_per_token(4) == 2 * 2 * facts.num_kv_heads * facts.head_dim * 4
    expected = (16, None) if family in ("gemma2", "gemma3") else (None, None)
    assert facts.sliding_windows == expected
    assert facts.has_capped_scores == (family == "gemma2")


def test_sliding_windows_of_every_layer_are_facts(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, "mistral", sliding_window=32)
    document = {"device": "cpu", "models": {"target_model": {"path": str(directory)}}}
    assert inspect_models(parse_config(document)).target.facts.sliding_windows == (32, 32)


def test_a_tokenizer_of_its_own_kind_is_compared_by_its_tokens(pair: Pair) -> None:
    """A base model may draft for its instruction-tuned sibling: which token ends a text may differ."""
    make_tokenizer(pair.draft)
    edit_json(pair.draft / "tokenizer_config.json", eos_token="<|im_end|>", chat_template=None)
    assert pair.inspect().draft is not None
