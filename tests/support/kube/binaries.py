"""The programs of Kubernetes: those of KUBEBUILDER_ASSETS, or built from Go modules once and kept."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from support.kube.cache import CACHE, ROOT, exclusive, key_of
from support.kube.errors import ClusterUnavailable
from support.kube.host import Say

KUBERNETES_VERSION = "1.37.2"

CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
NODE = ("kubelet", "kube-proxy", "coredns")


@dataclass(frozen=True)
class Module:
    """A Go module that builds to one binary, linked under the name of each program that is in it."""

    name: str
    programs: tuple[str, ...]
    linker_flags: str
    minutes: str

    @property
    def sources(self) -> list[Path]:
        directory = ROOT / "tests" / "cluster" / self.name
        return [directory / file for file in ("go.mod", "go.sum", "main.go")]

    @property
    def directory(self) -> Path:
        """Where its programs are once it is built."""
        return CACHE / "kube" / f"{self.name}-{key_of(self.sources, self.linker_flags)}"


_MAJOR, _MINOR, _ = KUBERNETES_VERSION.split(".")
_VERSION = "k8s.io/component-base/version"
KUBE = Module(
    name="kube",
    programs=(*CONTROL_PLANE, "kubelet", "kube-proxy"),
    # Feature gates have the defaults of the version that the binary believes to be.
    linker_flags=f"-s -w -X {_VERSION}.gitVersion=v{KUBERNETES_VERSION}"
    f" -X {_VERSION}.gitMajor={_MAJOR} -X {_VERSION}.gitMinor={_MINOR}",
    minutes="5 to 10",
)
COREDNS = Module(name="coredns", programs=("coredns",), linker_flags="-s -w", minutes="2 to 4")


def ensure_binaries(programs: tuple[str, ...], say: Say) -> dict[str, Path]:
    """Where each of the programs is; builds what is not there yet."""
    if assets := os.environ.get("KUBEBUILDER_ASSETS"):
        found = {program: Path(assets) / program for program in programs}
        if missing := [program for program, path in found.items() if not os.access(path, os.X_OK)]:
            raise ClusterUnavailable(f"KUBEBUILDER_ASSETS={assets} lacks {', '.join(missing)}")
        return found
    for module in (KUBE, COREDNS):
        if set(module.programs) & set(programs):
            _ensure_built(module, say)
    return {
        program: module.directory / program
        for module in (KUBE, COREDNS)
        for program in module.programs
        if program in programs
    }


def _ensure_built(module: Module, say: Say) -> None:
    directory = module.directory
    with exclusive(CACHE / "kube" / f"{module.name}.lock"):
        if directory.exists():
            return
        if shutil.which("go") is None:
            raise ClusterUnavailable(
                "a local cluster needs Go, or KUBEBUILDER_ASSETS with Kubernetes' binaries"
            )
        say(f"building {module.name} from its Go module, once: {module.minutes} minutes on two cores")
        partial = directory.with_name(f"{directory.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _go_build(module, partial / module.name)
        for program in module.programs:
            if program != module.name:
                (partial / program).symlink_to(module.name)
        partial.rename(directory)


def _go_build(module: Module, output: Path) -> None:
    command = ["go", "build", "-trimpath", "-ldflags", module.linker_flags, "-o", str(output), "."]
    environment = {**os.environ, "CGO_ENABLED": "0"}
    result = subprocess.run(
        command, cwd=module.sources[0].parent, env=environment, capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        raise ClusterUnavailable(f"{module.name} does not build: {result.stderr.strip()[-2000:]}")
