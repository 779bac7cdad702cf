"""Taking a TCP port, with an error that says which key to change."""

from __future__ import annotations

import os
import socket

from draftline_server.errors import ResourceError


def listen(host: str, port: int, *, key: str) -> socket.socket:
    """A listening socket; raises `ResourceError` naming `key`.

    The IPv6 wildcard listens for IPv4 as well, as gRPC's does, and is the IPv4 one where there is no IPv6.
    """
    address = host.strip("[]")
    if address == "::" and not socket.has_dualstack_ipv6():
        address = "0.0.0.0"
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, dualstack_ipv6=address == "::")
    except UnicodeError as error:  # of a name with a part that is too long
        raise ResourceError(f"{key}: cannot listen on {host}:{port}: not the name of a host") from error
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise ResourceError(f"{key}: cannot listen on {host}:{port}: {reason}") from error


def address_of(host: str, port: int) -> str:
    """As gRPC takes it: an IPv6 address needs brackets, with which it may be configured or without."""
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def check_free(host: str, port: int, *, key: str) -> None:
    """Raises `ResourceError` where the port cannot be taken now."""
    listen(host, port, key=key).close()
