"""The certificate of the metrics API: made here, kept in a Secret, renewed in time, shared by all replicas.

It signs itself and is no authority, so that trusting it trusts nothing else. A new one comes with a bundle of
itself and its predecessor: the API server trusts both until every replica has read the Secret again.
"""

from __future__ import annotations

import base64
import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from draftline_operator.cluster.interface import Cluster
from draftline_operator.errors import ClusterError, ConflictError
from draftline_operator.models.kinds import SECRET
from draftline_operator.models.observed import Object

LIFETIME: Final = datetime.timedelta(days=90)
RENEWED_BEFORE: Final = datetime.timedelta(days=30)
_CLOCK_SKEW: Final = datetime.timedelta(hours=1)

_CERTIFICATE_KEY, _PRIVATE_KEY, _BUNDLE_KEY = "tls.crt", "tls.key", "ca.crt"


@dataclass(frozen=True, slots=True)
class ServingCertificate:
    """All in PEM. The private key stays out of what is printed."""

    certificate: bytes
    private_key: bytes
    bundle: bytes
    """What clients have to trust: this certificate, and the one before while that is still valid."""

    def __repr__(self) -> str:
        return "ServingCertificate(...)"


def issue_certificate(
    dns_names: Sequence[str], now: datetime.datetime, *, predecessor: bytes | None = None
) -> ServingCertificate:
    """A certificate of a new key for a server of these names; the first one is its common name."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, dns_names[0][:64])])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + LIFETIME)
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName(name) for name in dns_names]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )
    private_key = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return ServingCertificate(certificate, private_key, certificate + (predecessor or b""))


def read_certificate(secret: Object) -> ServingCertificate | None:
    """What the Secret holds; None where it is empty or somebody has spoiled it."""
    data: Mapping[str, str] = secret.get("data") or {}
    try:
        certificate, private_key, bundle = (
            base64.b64decode(data[key], validate=True)
            for key in (_CERTIFICATE_KEY, _PRIVATE_KEY, _BUNDLE_KEY)
        )
        public_key = serialization.load_pem_private_key(private_key, password=None).public_key()
        is_pair = x509.load_pem_x509_certificate(certificate).public_key() == public_key
        is_trusted = certificate in bundle and len(x509.load_pem_x509_certificates(bundle)) > 0
    except (KeyError, TypeError, ValueError, UnsupportedAlgorithm):
        return None
    return ServingCertificate(certificate, private_key, bundle) if is_pair and is_trusted else None


def is_due(certificate: ServingCertificate, dns_names: Sequence[str], now: datetime.datetime) -> bool:
    """Whether it expires soon, is not valid yet, or is for other names."""
    parsed = x509.load_pem_x509_certificate(certificate.certificate)
    is_current = parsed.not_valid_before_utc <= now < parsed.not_valid_after_utc - RENEWED_BEFORE
    return not is_current or _dns_names(parsed) != list(dns_names)


def _dns_names(certificate: x509.Certificate) -> list[str]:
    """None at all where it does not say them in a way that can be read: then it is not of our making."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType):
        return []
    return names.get_values_for_type(x509.DNSName)


async def ensure_certificate(
    cluster: Cluster, *, namespace: str, name: str, dns_names: Sequence[str], now: datetime.datetime
) -> ServingCertificate:
    """The certificate in the Secret, made anew where it is missing or due.

    Of replicas that do this at once the first one wins and the others take what it wrote. The Secret itself
    is the chart's: it is filled here, never created.
    """
    secret = await _get_secret(cluster, namespace, name)
    current = read_certificate(secret)
    if current is not None and not is_due(current, dns_names, now):
        return current
    predecessor = current.certificate if current is not None and _is_valid(current, now) else None
    made = issue_certificate(dns_names, now, predecessor=predecessor)
    change = {
        "metadata": {"resourceVersion": secret["metadata"]["resourceVersion"]},
        "data": {
            _CERTIFICATE_KEY: base64.b64encode(made.certificate).decode(),
            _PRIVATE_KEY: base64.b64encode(made.private_key).decode(),
            _BUNDLE_KEY: base64.b64encode(made.bundle).decode(),
        },
    }
    try:
        if await cluster.patch(SECRET, namespace, name, change) is not None:
            return made
    except ConflictError:
        theirs = read_certificate(await _get_secret(cluster, namespace, name))
        if theirs is not None and not is_due(theirs, dns_names, now):
            return theirs
        raise
    raise _missing(namespace, name)


async def _get_secret(cluster: Cluster, namespace: str, name: str) -> Object:
    secret = await cluster.get(SECRET, namespace, name)
    if secret is None:
        raise _missing(namespace, name)
    return secret


def _missing(namespace: str, name: str) -> ClusterError:
    return ClusterError(f"Secret {namespace}/{name} for the metrics API's certificate is missing")


def _is_valid(certificate: ServingCertificate, now: datetime.datetime) -> bool:
    parsed = x509.load_pem_x509_certificate(certificate.certificate)
    return parsed.not_valid_before_utc <= now < parsed.not_valid_after_utc
