"""Certificates and kubeconfig files of one cluster, all signed by an authority of its own."""

from __future__ import annotations

import base64
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Authority:
    """Signs what the components of a cluster, and its users, show to each other."""

    directory: Path

    @property
    def certificate(self) -> Path:
        return self.directory / "ca.crt"

    @property
    def key(self) -> Path:
        return self.directory / "ca.key"

    def found(self) -> None:
        """Makes the authority itself, and the key that service account tokens are signed with."""
        self.directory.mkdir(mode=0o700, exist_ok=True)
        self._openssl(
            *("req", "-x509", *NEW_KEY, "-subj", "/CN=draftline-test-cluster", "-days", "30"),
            *("-keyout", "ca.key", "-out", "ca.crt"),
        )
        self._openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "service-accounts.key")
        self._openssl("ec", "-in", "service-accounts.key", "-pubout", "-out", "service-accounts.pub")

    def issue(self, file: str, user: str, groups: Sequence[str] = (), *, names: Sequence[str] = ()) -> None:
        """Makes FILE.crt and FILE.key, for a server of these names and for a client that is this user."""
        subject = "".join(f"/O={group}" for group in groups) + f"/CN={user}"
        extensions = (
            f"subjectAltName={','.join(names or [f'DNS:{file}'])}\nextendedKeyUsage=serverAuth,clientAuth\n"
        )
        self._openssl("req", *NEW_KEY, "-subj", subject, "-keyout", f"{file}.key", "-out", f"{file}.csr")
        (self.directory / f"{file}.ext").write_text(extensions)
        self._openssl(
            *("x509", "-req", "-in", f"{file}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial"),
            *("-days", "30", "-extfile", f"{file}.ext", "-out", f"{file}.crt"),
        )

    def kubeconfig(self, file: str, server: str) -> str:
        """A kubeconfig that needs no other file, for the user of FILE.crt."""
        cluster = {"server": server, "certificate-authority-data": _base64(self.certificate)}
        user = {
            "client-certificate-data": _base64(self.directory / f"{file}.crt"),
            "client-key-data": _base64(self.directory / f"{file}.key"),
        }
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "draftline", "cluster": cluster}],
            "users": [{"name": file, "user": user}],
            "contexts": [{"name": "draftline", "context": {"cluster": "draftline", "user": file}}],
            "current-context": "draftline",
        }
        return yaml.safe_dump(document, sort_keys=False)

    def _openssl(self, *arguments: str) -> None:
        command = ["openssl", *arguments]
        subprocess.run(command, cwd=self.directory, check=True, capture_output=True, text=True)


def _base64(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()
