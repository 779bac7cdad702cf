"""The rules of the repository's layout that no other tool checks."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from draftline_server.model.safetensors_header import read_header

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def names_of(requirements: list[str]) -> set[str]:
    """The normalized names of the packages that requirements ask for."""
    found = (re.match(r"[A-Za-z0-9._-]+", requirement) for requirement in requirements)
    return {re.sub(r"[-_.]+", "-", match.group()).lower() for match in found if match}


def closure_of(requirements: list[str]) -> set[str]:
    """The normalized names of all packages that come along with requirements, as they are installed here."""
    waiting = [(requirement, "") for requirement in requirements]
    seen: set[tuple[str, str]] = set()
    while waiting:
        text, extra_of_parent = waiting.pop()
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra_of_parent}):
            continue
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras}:
            if (name, extra) not in seen:
                seen.add((name, extra))
                waiting += [(inner, extra) for inner in metadata.requires(name) or ()]
    return {name for name, _ in seen}


@pytest.mark.parametrize("root", ["operator", "server"])
def test_source_roots_are_no_packages(root: str) -> None:
    # operator/__init__.py would take the place of the standard library's module.
    assert not (ROOT / root / "__init__.py").exists()


def test_tests_are_no_packages() -> None:
    assert [str(path) for path in (ROOT / "tests").rglob("__init__.py")] == []
    assert [str(path) for path in (ROOT / "tests").rglob("operator")] == []


@pytest.mark.parametrize(
    "package", ["operator/draftline_operator", "server/draftline_server", "protos/draftline"]
)
def test_packages_are_typed(package: str) -> None:
    assert (ROOT / package / "__init__.py").exists()
    assert (ROOT / package / "py.typed").exists()


def test_import_layers_are_kept() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_every_module_says_why_it_exists() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for root in ("operator", "server", "tests")
        for path in (ROOT / root).rglob("*.py")
        if ast.get_docstring(ast.parse(path.read_text())) is None
    ]
    assert silent == []


def test_the_extras_do_not_cross() -> None:
    torch_side = {"torch", "transformers", "tokenizers", "safetensors"}
    kubernetes_side = {"kopf", "kubernetes-asyncio", "kubernetes"}
    base = PROJECT["dependencies"]
    of_operator, of_server = (closure_of([*base, *EXTRAS[name]]) for name in ("operator", "server"))
    assert not of_operator & torch_side
    assert not of_server & kubernetes_side
    # Both go as deep as they should.
    assert "aiosignal" in of_operator
    assert "sympy" in of_server


def test_the_lock_covers_every_requirement() -> None:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[a-z0-9-]+==[A-Za-z0-9.+!]+", pin)] == []
    wanted = names_of(PROJECT["dependencies"]).union(*(names_of(extra) for extra in EXTRAS.values()))
    assert wanted <= names_of(pins)


def test_the_wheel_has_the_three_packages() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    packages = tools["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert packages == ["operator/draftline_operator", "server/draftline_server", "protos/draftline"]


def test_the_demos_head_is_small_and_leaves_out_what_its_target_has() -> None:
    head = ROOT / "server" / "draftline_server" / "heads" / "smollm2-135m-instruct-eagle3"
    assert {path.name for path in head.iterdir()} == {"README.md", "config.json", "model.safetensors"}
    assert sum(path.stat().st_size for path in head.iterdir()) <= 12_000_000
    tensors = read_header(head / "model.safetensors")
    assert not {"embed_tokens.weight", "lm_head.weight"} & tensors.keys()
    (verifier,) = json.loads((head / "config.json").read_text())["speculators_config"]["verifier"][
        "architectures"
    ]
    assert verifier == "LlamaForCausalLM"
