"""Container images without a registry: a base of Debian packages, and the product's own Dockerfiles on it.

Each image is an archive in the cache, under a key of all that goes into it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from support.kube import host
from support.kube.cache import CACHE, ROOT, exclusive, key_of
from support.kube.errors import ClusterFailed, ClusterUnavailable
from support.kube.host import Say

IMAGES = CACHE / "images"
KEPT_ARCHIVES = 4
CONTAINERD = ("ctr", "--address", "/run/containerd/containerd.sock", "--namespace", "k8s.io")

BASE_SUITE = "bookworm"


@dataclass(frozen=True)
class Base:
    """Stands in for the official image of the same name, which the Dockerfiles start from."""

    name: str
    packages: str

    @property
    def reference(self) -> str:
        return f"localhost/{self.name}"

    @property
    def key(self) -> str:
        return key_of([], BASE_SUITE, self.packages)


SLIM = Base("python:3.11-slim", "ca-certificates,python-is-python3,python3,python3-pip,python3-venv")
FULL = Base("python:3.11", f"{SLIM.packages},gcc,libc6-dev")

SOURCE_FILES = ("LICENSE", "README.md", "pyproject.toml", "requirements.lock")
SOURCE_PACKAGES = ("operator/draftline_operator", "protos/draftline", "server/draftline_server")

PAUSE = "localhost/pause:1"
PAUSE_SOURCE = """\
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static void end(int signal) { _exit(0); }
static void reap(int signal) { while (waitpid(-1, 0, WNOHANG) > 0); }

int main(void) {
    signal(SIGINT, end);
    signal(SIGTERM, end);
    signal(SIGCHLD, reap);
    for (;;) pause();
}
"""


@dataclass(frozen=True)
class Image:
    """One of the product's images."""

    name: str
    dockerfile: str
    bases: tuple[Base, ...]
    arguments: dict[str, str] = field(default_factory=dict)


OPERATOR = Image("draftline-operator", "operator/Dockerfile", (SLIM,))
# torch is several gigabytes: pods of tests mount it from the environment that the tests run in.
SERVER = Image("draftline-server", "server/Dockerfile", (SLIM, FULL), {"TORCH": "0"})
SERVER_WITH_TORCH = Image("draftline-server-torch", "server/Dockerfile", (SLIM, FULL))


@dataclass(frozen=True)
class BuiltImage:
    """What a pod names an image by, and where its archive is."""

    reference: str
    archive: Path


def ensure_image(image: Image, say: Say) -> BuiltImage:
    """Builds an image of the code as it is now, if that has not been done yet."""
    with tempfile.TemporaryDirectory(prefix="draftline-image-") as directory:
        context = Path(directory)
        # A copy, since the sources may change during the build.
        bases = [base.key for base in image.bases]
        key = key_of(_copy_sources(image, context), *bases, repr(image.arguments), root=context)
        built = BuiltImage(f"localhost/{image.name}:{key}", IMAGES / f"{image.name}-{key}.tar")
        if built.archive.exists():
            return built
        host.require_root()
        host.ensure_programs(host.IMAGES, say)
        for base in image.bases:
            ensure_base(base, say)
        with exclusive(IMAGES / f"{image.name}.lock"):
            if not built.archive.exists():
                say(f"building the image {built.reference}")
                _build(image, built.reference, context)
                _archive(built.reference, built.archive)
                _remove_old(image)
    return built


def _copy_sources(image: Image, context: Path) -> list[Path]:
    """Copies what an image is made of; returns the copies."""
    files = [ROOT / file for file in (".dockerignore", image.dockerfile, *SOURCE_FILES)]
    for package in SOURCE_PACKAGES:
        files += [f for f in (ROOT / package).rglob("*") if f.is_file() and "__pycache__" not in f.parts]
    copies = [context / file.relative_to(ROOT) for file in files]
    for file, copy in zip(files, copies, strict=True):
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, copy)
    return copies


def ensure_pause_image() -> Path:
    """The archive of the image that holds a pod's namespaces: a program that only waits."""
    archive = IMAGES / f"pause-{key_of([], PAUSE_SOURCE)}.tar"
    with exclusive(IMAGES / "pause.lock"):
        if not archive.exists():
            source, program = IMAGES / "pause.c", IMAGES / "pause"
            source.write_text(PAUSE_SOURCE)
            _run("gcc", "-Os", "-static", "-o", str(program), str(source))
            container = _buildah("from", "scratch")
            _buildah("copy", "--chmod", "755", container, str(program), "/pause")
            _buildah("config", "--entrypoint", '["/pause"]', container)
            _buildah("commit", "--rm", container, PAUSE)
            _archive(PAUSE, archive)
    return archive


def ensure_base(base: Base, say: Say) -> None:
    """Makes an image that the Dockerfiles start from."""
    with exclusive(IMAGES / "base.lock"):
        marker = IMAGES / f"base-{base.key}"
        if marker.exists():
            return
        say(f"building the image {base.name} from packages of Debian {BASE_SUITE}: about a minute")
        tree = IMAGES / "base.tar"
        _run(
            *("mmdebstrap", "--quiet", "--variant=minbase", f"--include={base.packages}"),
            *(BASE_SUITE, str(tree)),
        )
        container = _buildah("from", "scratch")
        _buildah("add", container, str(tree), "/")
        _buildah("config", "--env", "PATH=/usr/local/bin:/usr/bin:/bin", "--cmd", "python3", container)
        _buildah("commit", "--rm", container, base.reference)
        tree.unlink()
        marker.touch()


def ensure_slim_archive(say: Say) -> BuiltImage:
    """The slim base itself as an archive: an image with Python, for pods of tests."""
    ensure_base(SLIM, say)
    archive = IMAGES / f"base-{SLIM.key}.tar"
    with exclusive(IMAGES / "base-archive.lock"):
        if not archive.exists():
            _archive(SLIM.reference, archive)
    return BuiltImage(SLIM.reference, archive)


def import_image(command_inside: Callable[..., list[str]], archive: Path) -> None:
    """Brings an archive into the containerd of a cluster."""
    _run(*command_inside(*CONTAINERD, "images", "import", str(archive)))


def _build(image: Image, reference: str, context: Path) -> None:
    arguments = [f"--build-arg={name}={value}" for name, value in image.arguments.items()]
    try:
        _buildah(
            *("bud", "--isolation", "chroot", "--network", "host", "--pull-never", "--layers"),
            *(*arguments, *_pip_settings()),
            *("--file", str(context / image.dockerfile), "--tag", reference, str(context)),
        )
    except ClusterUnavailable as error:  # a fault of the product, not of the machine
        raise ClusterFailed(f"{image.dockerfile}: {error}") from error


def _pip_settings() -> list[str]:
    """What pip on this machine needs to reach its index, so that it does the same during a build."""
    places = [place for place in ("/etc/pip.conf", "/etc/ssl/certs") if Path(place).exists()]
    return [f"--volume={place}:{place}:ro" for place in places]


def _archive(reference: str, archive: Path) -> None:
    partial = archive.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    _buildah("push", "--quiet", reference, f"docker-archive:{partial}:{reference}")
    partial.rename(archive)


def _remove_old(image: Image) -> None:
    """Keeps the images of the code as it was last, since another run may be about to load one."""
    archives = sorted(IMAGES.glob(f"{image.name}-????????????.tar"), key=lambda file: file.stat().st_mtime)
    for archive in archives[:-KEPT_ARCHIVES]:
        archive.unlink()
        key = archive.stem.rpartition("-")[2]
        _buildah("rmi", "--force", f"localhost/{image.name}:{key}")


def _buildah(*arguments: str) -> str:
    storage = ["--root", str(IMAGES / "storage"), "--runroot", str(IMAGES / "storage-run")]
    command = ["buildah", *storage, "--storage-driver", "overlay", *arguments]
    return _run(*command, called=f"buildah {arguments[0]}").strip()


def _run(*command: str, called: str = "") -> str:
    program = shutil.which(command[0], path=host.SEARCH_PATH) or command[0]
    environment = {**os.environ, "PATH": host.SEARCH_PATH}
    result = subprocess.run(
        [program, *command[1:]], env=environment, capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        raise ClusterUnavailable(f"{called or ' '.join(command)} failed: {result.stderr.strip()[-2000:]}")
    return result.stdout
