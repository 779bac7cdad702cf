"""`draftline-server distill` with a tiny target: the whole way, interrupted anywhere, and with bad input."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from draftline_server.distill.dialogues import Dialogue, write_dialogues
from draftline_server.model.tokenizer import Tokenizer
from support.engines import generate, make_engine
from support.prompts import mixed_prompts, random_prompt
from support.reference import ReferenceOf
from support.tiny_models import Family, make_tiny_model
from support.zoo import ModelZoo

OPTIONS = ["--num-dialogues", "130", "--max-answer-tokens", "24", "--draft-vocab-size", "200"]
# Room for dialogues and features, but not for a checkpoint beside them.
FOR_FEATURES = 6800
QUICK = [*OPTIONS, "--unrolled-steps", "2", "--batch-size", "4", "--steps", "12"]


def command(target: Path, out: Path, *options: str) -> list[str]:
    module = [sys.executable, "-m", "draftline_server", "distill"]
    return [*module, "--target", str(target), "--out", str(out), "--device", "cpu", *options]


def run(target: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(target, out, *options), capture_output=True, text=True, timeout=300, check=False
    )


def weights(directory: Path) -> bytes:
    return (directory / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("distill") / "target", vocab_size=384, layers=3)


@pytest.fixture(scope="module")
def undisturbed(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "head"
    done = run(target, out, *QUICK)
    assert done.returncode == 0, done.stderr
    assert "acceptance by position" in done.stdout
    return out


def test_the_result_is_a_head_that_an_engine_drafts_with(
    target: Path, undisturbed: Path, reference_of: ReferenceOf
) -> None:
    engine = make_engine(target, undisturbed, speculation={"methods": ("draft_model",)})
    prompts = mixed_prompts(6)
    completions = generate(engine, prompts, max_tokens=20)
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.token_ids == reference_of(target).greedy(prompt, 20)
    assert engine.statistics().draft_tokens["draft_model"] > 0
    card = (undisturbed / "README.md").read_text()
    assert "| 8 |" in card
    assert "draftline-server" in card
    document = json.loads((undisturbed / "config.json").read_text())
    assert document["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]
    assert sorted(path.name for path in undisturbed.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]


def test_done_again_it_gives_the_same_without_training_anew(target: Path, undisturbed: Path) -> None:
    before = weights(undisturbed)
    work = undisturbed.with_name("head.work")
    stamps = {path: path.stat().st_mtime_ns for path in work.rglob("part-*")}
    assert run(target, undisturbed, *QUICK).returncode == 0
    assert weights(undisturbed) == before
    assert {path: path.stat().st_mtime_ns for path in work.rglob("part-*")} == stamps


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_any_moment_it_ends_with_the_same_result(
    target: Path, undisturbed: Path, tmp_path: Path
) -> None:
    generator = random.Random(7)
    out = tmp_path / "head"
    work = tmp_path / "head.work"
    options = [*QUICK, "--checkpoint-seconds", "0"]
    # In each of the steps, as soon as it has left something; and at any moment after that.
    for left in ("dialogues/part-*", "features/part-*", "training.pt", "head/config.json"):
        process = subprocess.Popen(command(target, out, *options), stderr=subprocess.DEVNULL)
        while not list(work.glob(left)):
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(generator.uniform(0, 0.2))
        process.kill()
        process.wait()
    assert run(target, out, *options).returncode == 0
    assert weights(out) == weights(undisturbed)


@pytest.mark.slow
def test_a_head_learns_what_its_target_says(tmp_path: Path) -> None:
    """A target that hardly looks back, so that a few steps are enough."""
    target = make_tiny_model(tmp_path / "target", layers=2, logit_scale=6.0)
    rights = []
    for steps in ("1", "150"):
        done = run(target, tmp_path / f"head-{steps}", *OPTIONS, "--unrolled-steps", "2", "--steps", steps)
        assert done.returncode == 0, done.stderr
        rights.append(float(done.stderr.rpartition("right ")[2].split()[0].rstrip("]")))
    assert rights[1] > rights[0] + 0.05


def test_prompts_of_a_file_are_answered(target: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines: list[dict[str, object]] = [
        {
            "messages": [
                {"role": "user", "content": f"Question {index}?"},
                {"role": "assistant", "content": "x"},
            ]
        }
        if index % 2
        else {"prompt": f"Question {index}?"}
        for index in range(40)
    ]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    done = run(target, tmp_path / "head", *QUICK, "--prompts", str(prompts))
    assert done.returncode == 0, done.stderr
    assert "answers to prompts.jsonl" in (tmp_path / "head" / "README.md").read_text()
    expected = Tokenizer.load(target).encode_chat([("user", "Question 1?")])
    import numpy as np

    with np.load(tmp_path / "head.work" / "dialogues" / "part-00000.npz") as archive:
        assert expected in [
            archive["tokens"][start : start + len(expected)].tolist()
            for start in range(len(archive["tokens"]))
        ]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", "has no prompts"),
        ("\n \n", "has no prompts"),
        ('{"prompt": "a"}\nnonsense', "line 2"),
        ('{"text": "a"}', "line 1: neither prompt nor messages"),
        ('{"messages": [{"role": "user"}]}', "line 1"),
        ('{"messages": [{"role": "user", "content": null}]}', "line 1: content is not a text"),
        ('{"prompt": ["a"]}', "line 1: prompt is not a text"),
    ],
)
def test_bad_prompts_are_refused_by_line(target: Path, tmp_path: Path, prompts: str, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(prompts)
    assert_refused(run(target, tmp_path / "head", *QUICK, "--prompts", str(file)), "--prompts", message)
    assert not (tmp_path / "head").exists()


def assert_refused(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    for part in parts:
        assert part in line


def test_a_tokenizer_without_a_chat_template_needs_prompts(zoo: ModelZoo, tmp_path: Path) -> None:
    assert_refused(run(zoo.letters(), tmp_path / "head", *QUICK), "no chat template", "--prompts")


def test_a_truncated_target_is_refused(target: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(target, broken)
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert_refused(run(broken, tmp_path / "head", *QUICK), "truncated")


def test_an_unsupported_target_is_refused(target: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(target, other)
    document = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(document | {"model_type": "mamba"}))
    assert_refused(run(other, tmp_path / "head", *QUICK), "mamba", "cannot be served")


def test_a_damaged_checkpoint_is_not_taken_for_a_whole_one(target: Path, undisturbed: Path) -> None:
    checkpoint = undisturbed.with_name("head.work") / "training.pt"
    whole = checkpoint.read_bytes()
    try:
        checkpoint.write_bytes(whole[: len(whole) // 2])
        assert_refused(run(target, undisturbed, *QUICK), "training.pt", "damaged")
    finally:
        checkpoint.write_bytes(whole)


def test_a_damaged_part_of_the_features_is_named(target: Path, undisturbed: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    shutil.copytree(undisturbed.with_name("head.work"), work)
    part = work / "features" / "part-00000.safetensors"
    part.write_bytes(part.read_bytes()[:-100])
    assert_refused(run(target, tmp_path / "head", *QUICK, "--work", str(work)), part.name, "damaged")


@pytest.mark.parametrize(("out", "work"), [("head", "head/work"), ("head", "head"), ("work/head", "work")])
def test_result_and_work_lie_side_by_side(target: Path, tmp_path: Path, out: str, work: str) -> None:
    done = run(target, tmp_path / out, *QUICK, "--work", str(tmp_path / work))
    assert_refused(done, "--work", "side by side")


def test_a_target_that_no_head_can_be_made_for_is_refused_at_once(tmp_path: Path) -> None:
    target = make_tiny_model(tmp_path / "target", "gpt2")
    assert_refused(run(target, tmp_path / "head", *QUICK), "--target", "RMS norm")
    assert not list(tmp_path.glob("head.work/dialogues"))


@pytest.mark.parametrize("family", ["gemma2", "qwen3"])
def test_heads_are_made_for_other_families(tmp_path: Path, family: Family) -> None:
    target = make_tiny_model(tmp_path / "target", family)
    done = run(target, tmp_path / "head", *QUICK, "--steps", "1")
    assert done.returncode == 0, done.stderr
    assert "nan" not in (tmp_path / "head" / "README.md").read_text()


def test_long_texts_are_cut(target: Path, tmp_path: Path) -> None:
    """As long as the target's context, as chat logs may be, or with prompts that leave no room at all."""
    longest = 1024
    texts = [
        Dialogue(tuple(random_prompt(longest + 100, seed=seed)), 20 if seed else longest + 50)
        for seed in range(12)
    ]
    write_dialogues(tmp_path / "long.npz", texts)
    done = run(target, tmp_path / "head", *QUICK, "--dialogues", str(tmp_path / "long.npz"))
    assert done.returncode == 0, done.stderr
    assert "| data | answers to long.npz: 10 dialogues" in (tmp_path / "head" / "README.md").read_text()


def test_other_settings_do_not_go_on_from_what_was_begun(target: Path, undisturbed: Path) -> None:
    assert_refused(run(target, undisturbed, *QUICK, "--seed", "5"), "--work", "seed")
    assert_refused(run(target, undisturbed, *QUICK, "--unrolled-steps", "3"), "training.pt", "unrolled_steps")


def test_with_another_recipe_it_trains_anew_from_the_same_features(
    target: Path, undisturbed: Path, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    shutil.copytree(undisturbed.with_name("head.work"), work)
    features = sorted((work / "features").iterdir())
    written = [path.stat().st_mtime_ns for path in features]
    (work / "training.pt").unlink()
    done = run(target, tmp_path / "head", *QUICK, "--unrolled-steps", "3", "--work", str(work))
    assert done.returncode == 0, done.stderr
    assert [path.stat().st_mtime_ns for path in features] == written
    assert weights(tmp_path / "head") != weights(undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kilobytes", [8, 64, FOR_FEATURES])
def test_a_full_disk_is_an_error_and_nothing_half_written_is_taken_for_whole(
    target: Path, undisturbed: Path, tmp_path: Path, kilobytes: int
) -> None:
    """Full for the dialogues, for the features, and for what training leaves."""
    place = tmp_path / "mounted"
    place.mkdir()
    size = f"size={kilobytes}k"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(place)], check=False)
    if mounted.returncode != 0:
        pytest.skip("needs a file system of its own, so a full one is NOT tested")
    work = place / "work"
    try:
        assert_refused(run(target, tmp_path / "head", *QUICK, "--work", str(work)), str(work))
        assert not (tmp_path / "head").exists()
        shutil.copytree(work, tmp_path / "roomy")
    finally:
        subprocess.run(["umount", str(place)], check=True)
    # With more room it goes on from there.
    assert run(target, tmp_path / "head", *QUICK, "--work", str(tmp_path / "roomy")).returncode == 0
    assert weights(tmp_path / "head") == weights(undisturbed)


def test_what_is_no_head_is_not_replaced(target: Path, tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("mine")
    assert_refused(run(target, tmp_path, *QUICK), "--out", "no draft head")
    assert (tmp_path / "letters.txt").exists()


def test_time_is_a_budget(target: Path, tmp_path: Path) -> None:
    started = time.monotonic()
    minutes = [*OPTIONS, "--unrolled-steps", "2", "--minutes", "0.05"]
    assert run(target, tmp_path / "head", *minutes).returncode == 0
    assert time.monotonic() - started > 3.0
    state = torch.load(tmp_path / "head.work" / "training.pt", weights_only=True)
    assert 3.0 <= state["progress"]["seconds"] < 30.0
