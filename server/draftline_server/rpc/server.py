"""The gRPC server: its options, its services and its port."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from draftline.v1 import inference_pb2_grpc
from draftline_server.config import ServerConfig
from draftline_server.errors import ResourceError
from draftline_server.rpc.calls import Calls
from draftline_server.rpc.health import ServingHealth
from draftline_server.rpc.interceptors import StatusInterceptor
from draftline_server.rpc.ports import address_of, check_free
from draftline_server.rpc.servicer import SERVICE_NAME, InferenceServicer

_UNLIMITED = -1
_MAX_UNSEEN_CALLS = 20_000
_KEEPALIVE_SECONDS = 60
_KEEPALIVE_TIMEOUT_SECONDS = 20
_MIN_PING_INTERVAL_SECONDS = 10
# A stream that outlives its connection's age still gets the time that any request may take.
_AGE_GRACE_MARGIN_SECONDS = 30


def build_server(
    config: ServerConfig, *, servicer: InferenceServicer, serving_health: ServingHealth, calls: Calls
) -> grpc.aio.Server:
    """A server with the API, health and reflection, not started and without a port."""
    interceptor = StatusInterceptor(SERVICE_NAME, record=calls.record)
    server = grpc.aio.server(interceptors=[interceptor], options=_options(config))
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(serving_health.servicer, server)
    reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return server


def bind(server: grpc.aio.Server, config: ServerConfig) -> int:
    """Takes the port and returns it; raises `ResourceError` naming the key."""
    # gRPC would write its own lines to stderr for a port in use, and does not say why it failed.
    check_free(config.host, config.grpc_port, key="server.grpc_port")
    address = address_of(config.host, config.grpc_port)
    try:
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise ResourceError(f"server.grpc_port: cannot listen on {address}; is it in use?") from error


def _options(config: ServerConfig) -> list[tuple[str, int]]:
    grace_seconds = config.request_timeout_seconds + _AGE_GRACE_MARGIN_SECONDS
    return [
        # Two servers on one port would share its connections silently.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        # Our own messages are bounded by max_tokens_per_request.
        ("grpc.max_send_message_length", _UNLIMITED),
        ("grpc.max_connection_age_ms", round(config.max_connection_age_seconds * 1000)),
        ("grpc.max_connection_age_grace_ms", round(grace_seconds * 1000)),
        # Beyond it gRPC cancels calls at random, which clients do not retry; our own queue has the limit.
        ("grpc.server.max_pending_requests", _MAX_UNSEEN_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", _MAX_UNSEEN_CALLS),
        # Finds clients that vanished without a word, so that they do not keep generating.
        ("grpc.keepalive_time_ms", _KEEPALIVE_SECONDS * 1000),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_SECONDS * 1000),
        # Clients may ping as well, with or without a call.
        ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_SECONDS * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]
