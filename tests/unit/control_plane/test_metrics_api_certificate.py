"""The certificate is there, in time, the same for all replicas, and trusted before it is shown."""

from __future__ import annotations

import base64
import datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from draftline_operator.errors import ClusterError
from draftline_operator.services.serving_certificate import (
    LIFETIME,
    RENEWED_BEFORE,
    ServingCertificate,
    ensure_certificate,
    issue_certificate,
    read_certificate,
)
from support.object_store import ObjectStore

NAMES = ("api.draftline.svc", "api.draftline", "api")
NOW = datetime.datetime(2026, 11, 29, 12, tzinfo=datetime.UTC)
DAY = datetime.timedelta(days=1)
EMPTY = {
    "apiVersion": "v1",
    "kind": "Secret",
    "metadata": {"namespace": "draftline", "name": "api"},
    "type": "Opaque",
}
KEY = ("Secret", "draftline", "api")


async def ensure(store: ObjectStore, now: datetime.datetime = NOW) -> ServingCertificate:
    return await ensure_certificate(store, namespace="draftline", name="api", dns_names=NAMES, now=now)


def test_a_certificate_is_for_the_names_of_the_service_and_vouches_for_nobody_else() -> None:
    parsed = x509.load_pem_x509_certificate(issue_certificate(NAMES, NOW).certificate)
    names = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    usage = parsed.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert names.get_values_for_type(x509.DNSName) == list(NAMES)
    assert list(usage) == [ExtendedKeyUsageOID.SERVER_AUTH]
    assert not parsed.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert parsed.not_valid_before_utc < NOW < parsed.not_valid_after_utc == NOW + LIFETIME


async def test_an_empty_secret_is_filled_once_and_then_only_read() -> None:
    store = ObjectStore([EMPTY])
    made = await ensure(store)
    version = store.objects[KEY]["metadata"]["resourceVersion"]
    assert await ensure(store, NOW + LIFETIME - RENEWED_BEFORE - DAY) == made
    assert store.objects[KEY]["metadata"]["resourceVersion"] == version
    assert read_certificate(store.objects[KEY]) == made


async def test_a_certificate_is_renewed_before_it_expires_and_its_predecessor_stays_trusted() -> None:
    store = ObjectStore([EMPTY])
    first = await ensure(store)
    second = await ensure(store, NOW + LIFETIME - RENEWED_BEFORE)
    assert second.certificate != first.certificate
    assert second.bundle == second.certificate + first.certificate
    third = await ensure(store, NOW + 2 * (LIFETIME - RENEWED_BEFORE))
    assert third.bundle == third.certificate + second.certificate


async def test_what_has_expired_is_no_longer_trusted() -> None:
    store = ObjectStore([EMPTY])
    await ensure(store)
    late = await ensure(store, NOW + LIFETIME + DAY)
    assert late.bundle == late.certificate


async def test_of_replicas_that_fill_the_secret_at_once_all_take_what_the_first_wrote() -> None:
    store = ObjectStore([EMPTY])
    theirs = issue_certificate(NAMES, NOW)

    def write_first() -> None:
        store.before_patch = lambda: None
        parts = {"tls.crt": theirs.certificate, "tls.key": theirs.private_key, "ca.crt": theirs.bundle}
        data = {key: base64.b64encode(part).decode() for key, part in parts.items()}
        store.put({**store.objects[KEY], "data": data})

    store.before_patch = write_first
    assert await ensure(store) == theirs


async def test_a_certificate_for_another_service_is_replaced() -> None:
    store = ObjectStore([EMPTY])
    await ensure(store)
    other = await ensure_certificate(
        store, namespace="draftline", name="api", dns_names=("renamed.draftline.svc",), now=NOW
    )
    parsed = x509.load_pem_x509_certificate(other.certificate)
    names = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["renamed.draftline.svc"]


@pytest.mark.parametrize("spoiled", ["tls.crt", "tls.key", "ca.crt"])
@pytest.mark.parametrize("content", ["", "AAAA", "not base64!", None])
async def test_a_secret_that_somebody_has_spoiled_is_filled_anew(spoiled: str, content: str | None) -> None:
    store = ObjectStore([EMPTY])
    first = await ensure(store)
    store.objects[KEY]["data"][spoiled] = content
    second = await ensure(store)
    assert second != first
    assert read_certificate(store.objects[KEY]) == second


async def test_a_key_that_does_not_belong_to_the_certificate_is_noticed() -> None:
    store = ObjectStore([EMPTY])
    await ensure(store)
    foreign = issue_certificate(NAMES, NOW).private_key
    store.objects[KEY]["data"]["tls.key"] = base64.b64encode(foreign).decode()
    assert read_certificate(store.objects[KEY]) is None


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


def certificate_of_somebody(builder: x509.CertificateBuilder) -> dict[str, str]:
    """Data of a Secret, in order but for what the builder leaves out."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAMES[0])])
    made = (
        builder.subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW - DAY)
        .not_valid_after(NOW + LIFETIME)
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )
    private_key = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return {"tls.crt": encoded(made), "tls.key": encoded(private_key), "ca.crt": encoded(made)}


GARBLED = x509.UnrecognizedExtension(x509.SubjectAlternativeName.oid, b"\xff")


@pytest.mark.parametrize(
    "builder",
    [
        pytest.param(x509.CertificateBuilder(), id="names-nobody"),
        pytest.param(x509.CertificateBuilder().add_extension(GARBLED, critical=False), id="garbled-names"),
    ],
)
async def test_a_certificate_that_does_not_say_its_names_is_replaced(
    builder: x509.CertificateBuilder,
) -> None:
    store = ObjectStore([{**EMPTY, "data": certificate_of_somebody(builder)}])
    made = await ensure(store)
    parsed = x509.load_pem_x509_certificate(made.certificate)
    names = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == list(NAMES)
    assert read_certificate(store.objects[KEY]) == made


@pytest.mark.parametrize("part", ["tls.crt", "tls.key"])
async def test_a_key_of_an_unknown_kind_is_noticed(part: str) -> None:
    store = ObjectStore([EMPTY])
    await ensure(store)
    label = "CERTIFICATE" if part == "tls.crt" else "PRIVATE KEY"
    text = base64.b64decode(store.objects[KEY]["data"][part]).decode()
    der = base64.b64decode("".join(text.splitlines()[1:-1]))
    known, unknown = bytes.fromhex("06082a8648ce3d030107"), bytes.fromhex("06082a8648ce3d030106")
    assert known in der
    foreign = base64.encodebytes(der.replace(known, unknown)).decode()
    spoiled = f"-----BEGIN {label}-----\n{foreign}-----END {label}-----\n"
    store.objects[KEY]["data"][part] = encoded(spoiled.encode())
    assert read_certificate(store.objects[KEY]) is None


async def test_a_missing_secret_is_an_error_that_names_it() -> None:
    with pytest.raises(ClusterError, match="Secret draftline/api"):
        await ensure(ObjectStore())


def test_the_private_key_is_not_printed() -> None:
    made = issue_certificate(NAMES, NOW)
    assert "PRIVATE" not in repr(made) + str(made) + f"{made}"
