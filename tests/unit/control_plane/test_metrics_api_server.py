"""The metrics API over TLS on loopback, called as the API server calls it, and as others might try to."""

from __future__ import annotations

import asyncio
import base64
import datetime
import json
import logging
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from draftline_operator.models.load import ResourceLoad
from draftline_operator.services import metrics_api
from draftline_operator.services.access_reviews import REMEMBERED_SECONDS
from draftline_operator.services.metrics_api import MetricsApi, MetricsApiSettings
from draftline_operator.services.serving_certificate import LIFETIME, RENEWED_BEFORE, read_certificate
from support.object_store import ObjectStore

GROUP = "/apis/custom.metrics.k8s.io"
PATH = GROUP + "/v1beta2/namespaces/team/speculativedeployments.draftline.dev/chat/draftline_requests_waiting"
HPA = "system:serviceaccount:kube-system:horizontal-pod-autoscaler"
API_SERVICES = ("v1beta1.custom.metrics.k8s.io", "v1beta2.custom.metrics.k8s.io")
SECRET = ("Secret", "draftline", "metrics-api")
START = time.time()


class Authority:
    """Of client certificates, as the API server's aggregation layer has one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("front-proxy-ca")
        self.certificate = self._sign(self._key, self._name, is_authority=True)

    def issue(self, common_name: str) -> Path:
        """A file with a client's certificate and key."""
        key = ec.generate_private_key(ec.SECP256R1())
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        path = self._folder / f"{id(self)}-{common_name}.pem"
        path.write_bytes(private + self._sign(key, _name(common_name), is_authority=False))
        return path

    def _sign(self, key: ec.EllipticCurvePrivateKey, subject: x509.Name, *, is_authority: bool) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
            .public_bytes(serialization.Encoding.PEM)
        )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


@dataclass
class Clock:
    now: float = START

    def __call__(self) -> float:
        return self.now


class Loads:
    def __init__(self) -> None:
        self.known: dict[tuple[str, str], ResourceLoad] = {}

    def of(self, namespace: str, name: str) -> ResourceLoad | None:
        return self.known.get((namespace, name))


class World:
    """A metrics API that runs, and everything around it."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        self.client = self.authority.issue("front-proxy-client")
        self.clock = Clock()
        self.loads = Loads()
        self.store = ObjectStore(
            [_authentication(self.authority), _secret(), *map(_api_service, API_SERVICES)]
        )
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self.port: int = taken.getsockname()[1]
        settings = MetricsApiSettings(
            namespace="draftline",
            service="metrics-api",
            secret="metrics-api",
            host="127.0.0.1",
            port=self.port,
        )
        self.api = MetricsApi(cluster=self.store, loads=self.loads, settings=settings, clock=self.clock)

    def set_load(self, *, waiting: int, running: int, age: float = 0.0) -> None:
        self.loads.known["team", "chat"] = ResourceLoad(
            waiting=waiting, running=running, sampled_at=self.clock.now - age
        )

    def trust(self) -> ssl.SSLContext:
        """What the API server takes from the APIService: one certificate, only for the Service's name."""
        bundles = {self.store.objects["APIService", None, name]["spec"]["caBundle"] for name in API_SERVICES}
        (bundle,) = bundles
        context = ssl.create_default_context(cadata=base64.b64decode(bundle).decode())
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as Go does
        return context

    async def get(
        self,
        path: str,
        *,
        client: Path | None = None,
        method: str = "GET",
        context: ssl.SSLContext | None = None,
        **headers: str,
    ) -> tuple[int, Any]:
        context = context or self.trust()
        if client is not None:
            context.load_cert_chain(client)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        async with (
            aiohttp.ClientSession() as session,
            session.request(
                method,
                f"https://127.0.0.1:{self.port}{path}",
                ssl=context,
                server_hostname="metrics-api.draftline.svc",
                headers=sent,
            ) as response,
        ):
            text = await response.text()
            return response.status, json.loads(text) if response.content_type == "application/json" else text

    async def ask(self, path: str = PATH, *, user: str = HPA) -> tuple[int, Any]:
        """As the API server passes it on."""
        return await self.get(
            path, client=self.client, X_Remote_User=user, X_Remote_Group="system:authenticated"
        )


@asynccontextmanager
async def running(world: World) -> AsyncIterator[World]:
    task = asyncio.create_task(world.api.run())
    try:
        await until(lambda: world.api.state().status == "ok" or task.done())
        yield world
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 # what is waited for is the state of a server, which has no event
            await asyncio.sleep(0.01)


def _authentication(authority: Authority, *names: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"namespace": "kube-system", "name": "extension-apiserver-authentication"},
        "data": {
            "requestheader-client-ca-file": authority.certificate.decode(),
            "requestheader-allowed-names": json.dumps(names or ["front-proxy-client"]),
            "requestheader-username-headers": '["X-Remote-User"]',
            "requestheader-group-headers": '["X-Remote-Group"]',
            "requestheader-extra-headers-prefix": '["X-Remote-Extra-"]',
        },
    }


def _secret() -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"namespace": SECRET[1], "name": SECRET[2]}}


def _api_service(name: str, namespace: str = "draftline") -> dict[str, Any]:
    return {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": name},
        "spec": {"service": {"namespace": namespace, "name": "metrics-api"}},
        "status": {"conditions": [{"type": "Available", "status": "True"}]},
    }


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(metrics_api, "_CHECKED_EVERY_SECONDS", 0.02)
    monkeypatch.setattr(metrics_api, "_RETRIED_AFTER_SECONDS", 0.02)
    async with running(World(tmp_path)) as world:
        yield world


async def test_the_autoscaler_reads_waiting_and_running_requests(world: World) -> None:
    world.set_load(waiting=7, running=32)
    for metric, value in (("draftline_requests_waiting", "7"), ("draftline_requests_running", "32")):
        status, document = await world.ask(PATH.replace("draftline_requests_waiting", metric))
        assert (status, len(document["items"]), document["items"][0]["value"]) == (200, 1, value)
        assert document["items"][0]["metric"]["name"] == metric
        status, older = await world.ask(
            PATH.replace("draftline_requests_waiting", metric).replace("v1beta2", "v1beta1")
        )
        assert (status, older["items"][0]["metricName"], older["items"][0]["value"]) == (200, metric, value)


@pytest.mark.parametrize(
    "path",
    [
        PATH.replace("/chat/", "/unknown/"),
        PATH.replace("/team/", "/other/"),
        PATH.replace("_waiting", "_imagined"),
        PATH.replace("v1beta2", "v1"),
        PATH.replace("speculativedeployments.draftline.dev", "pods"),
        PATH + "?metricLabelSelector=a%3Db",
        GROUP + "/v2",
        "/",
        "/openapi/v2",
    ],
)
async def test_what_is_not_there_is_a_404_with_a_status_document(world: World, path: str) -> None:
    world.set_load(waiting=7, running=32)
    status, document = await world.ask(path)
    assert (status, document["kind"], document["reason"]) == (404, "Status", "NotFound")


async def test_an_empty_label_selector_selects_everything(world: World) -> None:
    world.set_load(waiting=7, running=32)
    assert (await world.ask(PATH + "?metricLabelSelector="))[0] == 200


async def test_a_load_that_nobody_has_seen_for_a_while_is_a_404_so_that_replicas_stay(world: World) -> None:
    world.set_load(waiting=7, running=32, age=29)
    assert (await world.ask())[0] == 200
    world.set_load(waiting=7, running=32, age=31)
    status, document = await world.ask()
    assert (status, document["message"]) == (
        404,
        "draftline_requests_waiting of team/chat was last seen 31 s ago",
    )


async def test_discovery_is_answered_for_the_group_and_both_versions(world: World) -> None:
    assert (await world.ask("/apis"))[1]["kind"] == "APIGroupList"
    assert (await world.ask(GROUP))[1]["preferredVersion"]["version"] == "v1beta2"
    for version in ("v1beta1", "v1beta2"):
        status, document = await world.ask(f"{GROUP}/{version}")
        assert (status, len(document["resources"])) == (200, 2)


@pytest.mark.parametrize("path", ["/healthz", "/livez", "/readyz"])
async def test_kubelets_probe_without_a_certificate(world: World, path: str) -> None:
    assert await world.get(path) == (200, "ok\n")


@pytest.mark.parametrize("path", [PATH, GROUP, GROUP + "/v1beta2", "/apis", "/metrics"])
async def test_without_the_api_servers_certificate_nothing_is_told(world: World, path: str) -> None:
    world.set_load(waiting=7, running=32)
    status, document = await world.get(path, X_Remote_User="system:admin", X_Remote_Group="system:masters")
    assert (status, document["reason"]) == (401, "Unauthorized")


async def test_a_certificate_of_the_right_authority_and_the_wrong_name_is_nobody(world: World) -> None:
    client = world.authority.issue("kubelet")
    status, _ = await world.get(PATH, client=client, X_Remote_User=HPA)
    assert status == 401


async def test_a_certificate_of_another_authority_does_not_even_connect(world: World, tmp_path: Path) -> None:
    client = Authority(tmp_path).issue("front-proxy-client")
    with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
        await world.get(PATH, client=client, X_Remote_User=HPA)


async def test_whoever_may_not_read_the_metric_is_refused_by_name(world: World) -> None:
    world.set_load(waiting=7, running=32)
    world.store.allows = lambda spec: spec["user"] == HPA
    status, document = await world.ask(user="eve")
    assert (status, document["reason"]) == (403, "Forbidden")
    assert document["message"] == "eve may not get draftline_requests_waiting in namespace team"
    assert (await world.ask())[0] == 200
    attributes = world.store.reviews[-1]["spec"]["resourceAttributes"]
    assert attributes == {
        "verb": "get",
        "group": "custom.metrics.k8s.io",
        "version": "v1beta2",
        "resource": "speculativedeployments.draftline.dev",
        "subresource": "draftline_requests_waiting",
        "namespace": "team",
        "name": "chat",
    }


async def test_verdicts_are_remembered_for_a_moment_and_for_one_caller_only(world: World) -> None:
    world.set_load(waiting=7, running=32)
    for _ in range(3):
        assert (await world.ask())[0] == 200
    assert len(world.store.reviews) == 1
    await world.ask(user="eve")
    assert len(world.store.reviews) == 2
    world.store.allows = lambda spec: False
    assert (await world.ask())[0] == 200
    world.clock.now += REMEMBERED_SECONDS
    assert (await world.ask())[0] == 403


async def test_while_the_api_server_is_away_nobody_is_let_in_and_nothing_breaks(world: World) -> None:
    world.set_load(waiting=7, running=32)
    world.store.is_reachable = False
    status, document = await world.ask()
    assert (status, document["reason"]) == (503, "ServiceUnavailable")
    await until(lambda: world.api.state().status == "unavailable")
    assert world.api.state().detail == "the API server is away"
    world.store.is_reachable = True
    await until(lambda: world.api.state().status == "ok")
    assert (await world.ask())[0] == 200


async def test_only_get_is_served(world: World) -> None:
    status, document = await world.get(PATH, client=world.client, method="DELETE", X_Remote_User=HPA)
    assert (status, document["reason"]) == (405, "MethodNotAllowed")


async def test_a_fault_of_our_own_is_an_internal_error_that_tells_nothing(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.loads.known["team", "chat"] = "nonsense"  # type: ignore[assignment] # on purpose
    with caplog.at_level(logging.ERROR):
        status, document = await world.ask()
    assert (status, document["message"]) == (500, "internal error")
    assert "metrics request failed" in caplog.text


async def test_the_certificate_is_renewed_without_turning_anybody_away(world: World, tmp_path: Path) -> None:
    old = World(tmp_path)
    old.clock.now = START - (LIFETIME - RENEWED_BEFORE / 2).total_seconds()
    async with running(old):
        first = read_certificate(old.store.objects[SECRET])
        trusted_before = old.trust()
        old.clock.now = START
        old.set_load(waiting=8, running=32)
        async with asyncio.timeout(10):
            while await is_trusted(old, trusted_before):
                assert (await old.ask())[0] == 200
        assert (await old.ask())[0] == 200
        second = read_certificate(old.store.objects[SECRET])
    assert first is not None
    assert second is not None
    assert second.bundle == second.certificate + first.certificate


async def is_trusted(world: World, context: ssl.SSLContext) -> bool:
    try:
        return (await world.get("/healthz", context=context))[0] == 200
    except aiohttp.ClientConnectorCertificateError:
        return False


async def test_replicas_share_a_certificate(world: World, tmp_path: Path) -> None:
    world.set_load(waiting=7, running=32)
    other = World(tmp_path)
    other.store, other.authority, other.client = world.store, world.authority, world.client
    settings = MetricsApiSettings(
        namespace="draftline", service="metrics-api", secret="metrics-api", host="127.0.0.1", port=other.port
    )
    other.api = MetricsApi(cluster=world.store, loads=world.loads, settings=settings, clock=world.clock)
    version = world.store.objects[SECRET]["metadata"]["resourceVersion"]
    async with running(other):
        assert await other.ask() == await world.ask()
    assert world.store.objects[SECRET]["metadata"]["resourceVersion"] == version


async def test_new_authorities_of_the_api_server_are_followed(world: World, tmp_path: Path) -> None:
    world.set_load(waiting=7, running=32)
    old = world.client
    successor = Authority(tmp_path)
    world.store.put(_authentication(successor, "aggregator"))
    world.client = successor.issue("aggregator")
    async with asyncio.timeout(10):
        while True:
            with suppress(aiohttp.ClientError):
                if (await world.ask())[0] == 200:
                    break
    with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
        await world.get(PATH, client=old, X_Remote_User=HPA)


async def test_an_authority_that_cannot_be_read_is_told_and_ends_nothing(world: World) -> None:
    whole = world.store.objects["ConfigMap", "kube-system", "extension-apiserver-authentication"]
    spoiled = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
    world.store.put({**whole, "data": {**whole["data"], "requestheader-client-ca-file": spoiled}})
    await until(lambda: world.api.state().status == "unavailable")
    assert "certificate cannot be used" in world.api.state().detail
    assert await world.get("/healthz") == (200, "ok\n"), "what it had goes on"
    world.store.put(whole)
    await until(lambda: world.api.state().status == "ok")


async def test_a_certificate_of_somebody_that_names_nobody_is_replaced(world: World) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("metrics-api.draftline.svc")
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = (
        builder.serial_number(1)
        .not_valid_before(now)
        .not_valid_after(now + LIFETIME)
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    theirs = {"tls.crt": made, "tls.key": private, "ca.crt": made}
    data = {part: base64.b64encode(content).decode() for part, content in theirs.items()}
    world.store.put({**_secret(), "data": data})
    await until(lambda: world.store.objects[SECRET]["data"] != data)
    await until(lambda: world.api.state().status == "ok")
    world.set_load(waiting=7, running=32)
    assert (await world.ask())[0] == 200


async def test_somebody_elses_apiservice_is_shown_and_never_touched(world: World) -> None:
    theirs = world.store.put(_api_service(API_SERVICES[0], namespace="monitoring"))
    await until(lambda: world.api.state().status == "conflict")
    assert (
        world.api.state().detail == f"APIService {API_SERVICES[0]} belongs to Service monitoring/metrics-api"
    )
    await asyncio.sleep(0.1)
    assert world.store.objects["APIService", None, API_SERVICES[0]] == theirs
    world.store.put(_api_service(API_SERVICES[0]))
    await until(lambda: world.api.state().status == "ok")


async def test_who_takes_an_apiservice_over_in_the_last_moment_is_not_overwritten(tmp_path: Path) -> None:
    world = World(tmp_path)
    taken: list[Any] = []

    def take_over() -> None:
        if "data" in world.store.objects[SECRET] and not taken:
            taken.append(world.store.put(_api_service(API_SERVICES[1], namespace="monitoring")))

    world.store.before_patch = take_over
    task = asyncio.create_task(world.api.run())
    await until(lambda: "modified" in world.api.state().detail or world.api.state().status == "conflict")
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert world.store.objects["APIService", None, API_SERVICES[1]] == taken[0]


async def test_a_port_that_is_taken_is_an_error_at_once(tmp_path: Path) -> None:
    world = World(tmp_path)
    with (
        socket.create_server(("127.0.0.1", world.port)),
        pytest.raises(OSError, match="in use"),
    ):
        await world.api.run()
