"""Checks whether the endpoint can listen on a port, and whether it may do so without keys."""

from __future__ import annotations

import errno
import ipaddress
import secrets
import socket
from contextlib import suppress
from datetime import UTC, datetime

from ..config.config import Endpoint
from ..errors import ClusterError, PortInUse
from ..home import Home
from ..keys import Key, read_keys
from ..trust.endpoint_certificate import Advice, check_certificate

GIVEN_PORTS = range(20_000, 32_768)
"""Above them are the ports that Linux gives away by itself (macOS begins at 49,152), below them those of Ray's
workers."""

TRIES = 100

_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def check_port_free(listen: str, port: int) -> None:
    """Returns if a server could listen there now.

    Raises:
        PortInUse: somebody else does.
        ClusterError: this machine has no such address, or this user may not use the port.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(listen, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ClusterError(f"cannot listen on {listen!r}: {error.strerror}") from None
    with socket.socket(family, kind, protocol) as probe:
        # Lingering connections of an earlier server (TIME_WAIT) are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise _why(error, listen, port) from None
    # macOS lets one bind 127.0.0.1 next to a listener on 0.0.0.0, which would then lose its callers.
    with socket.socket(family, kind, protocol) as caller:
        caller.settimeout(1.0)
        if caller.connect_ex((_LOOPBACK.get(listen, address[0]), *address[1:])) == 0:
            raise _in_use(port)


def listens_to_strangers(endpoint: Endpoint) -> bool:
    """Returns whether other machines can reach the endpoint."""
    if endpoint.listen == "localhost":
        return False
    try:
        return not ipaddress.ip_address(endpoint.listen).is_loopback
    except ValueError:
        return True


def valid_keys(home: Home) -> list[Key]:
    """Returns the keys that are not revoked.

    Raises:
        KeysDamaged: the home's keys cannot be read.
    """
    return [key for key in read_keys(home) or () if key.revoked is None]


def check_endpoint(endpoint: Endpoint, home: Home) -> list[Advice]:
    """Checks whether the endpoint may be served as configured. Returns advice on its certificate.

    Raises:
        ClusterError: other machines could use it without a key, or its certificate cannot be used.
        KeysDamaged: the home's keys cannot be read.
    """
    if not valid_keys(home) and listens_to_strangers(endpoint):
        raise ClusterError(
            f"the endpoint would listen on {endpoint.listen}, where everybody could use it: make a key first "
            "(`satchel keys create NAME`), or listen on 127.0.0.1"
        )
    return [] if endpoint.tls is None else check_certificate(endpoint.tls, datetime.now(UTC))[1]


def free_port(listen: str = "127.0.0.1") -> int:
    """Returns a port that was free a moment ago. The system gives none of these to connections, nor to servers that
    take any port, as Ray's do: until somebody listens there, one of them could take it."""
    family = socket.AF_INET6 if ":" in listen else socket.AF_INET
    for _ in range(TRIES):
        with socket.socket(family) as probe, suppress(OSError):
            probe.bind((listen, secrets.choice(GIVEN_PORTS)))
            return int(probe.getsockname()[1])
    with socket.socket(family) as probe:
        probe.bind((listen, 0))
        return int(probe.getsockname()[1])


def _in_use(port: int) -> PortInUse:
    return PortInUse(f"port {port} is in use; choose another with --port (or `make serve PORT=...`)")


def _why(error: OSError, listen: str, port: int) -> ClusterError:
    if error.errno == errno.EADDRINUSE:
        return _in_use(port)
    if error.errno == errno.EADDRNOTAVAIL:
        return ClusterError(f"cannot listen on {listen}: this machine has no such address")
    if error.errno in (errno.EACCES, errno.EPERM):
        return ClusterError(f"cannot listen on port {port}: this user may not; choose one above 1023 with --port")
    return ClusterError(f"cannot listen on {listen}:{port}: {error.strerror or error}")
