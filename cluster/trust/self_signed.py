"""Makes a self-signed certificate for the endpoint, for clients that are given a copy of it."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from ..config.config import Tls
from ..environment import is_macos
from ..errors import ClusterError, ConfigError
from ..home import Home, prepare_home, write_private
from .certificates import alternative_names, begun, own_key, signed
from .endpoint_certificate import Certificate, check_certificate, read_certificate

DAYS = 825
"""Apple's devices refuse certificates that are valid for longer."""

_CLOCKS = timedelta(hours=1)
"""How far another machine's clock may be behind."""

_NAME = re.compile(r"(\*\.)?([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII)
_NAME_CHARACTERS_MAX = 253


def own_tls(home: Home) -> Tls:
    """Returns the files of the certificate and the key that are made here."""
    return Tls(certificate=str(home.endpoint_certificate_file), key=str(home.endpoint_key_file))


def make_certificate(home: Home, hosts: Iterable[str], *, days: int = DAYS, renew: bool = False) -> Certificate:
    """Makes the certificate of this home's endpoint. Its key is made at the first call and stays.

    Args:
        hosts: names and addresses by which clients reach this machine, besides its own. If empty, a renewed
            certificate keeps those it had.
        renew: replace one that is still valid.

    Raises:
        ConfigError: a host is neither a name nor an address.
        ClusterError: there is a valid one already, or the home cannot be written.
    """
    wanted = [checked_host(host) for host in hosts]
    prepare_home(home)
    path, now = home.endpoint_certificate_file, datetime.now(UTC)
    if not renew and (former := _valid(home, now)) is not None:
        raise ClusterError(
            f"{path} is valid until {former.valid_until:%Y-%m-%d}; `--renew` replaces it, with the same key"
        )
    if not wanted and path.exists():
        wanted = _names_before(home)
    key = own_key(home.endpoint_key_file, lost=home.endpoint_key_file)
    start = now - _CLOCKS
    builder = begun("endpoint", key.public_key(), "endpoint", key, (start, start + timedelta(days=days)))
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(alternative_names(dict.fromkeys([*own_names(), *wanted])), critical=False)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    write_private(path, signed(builder, key))
    return read_certificate(str(path))


def own_names() -> list[str]:
    """Returns the names and addresses that this machine knows of itself."""
    own = socket.gethostname().lower().rstrip(".")
    names = [own, f"{own.removesuffix('.local')}.local"] if is_macos() else [own]
    return ["localhost", "127.0.0.1", "::1", *(name for name in names if _is_name(name))]


def checked_host(host: str) -> str:
    """Returns a host in the form that a certificate has.

    Raises:
        ConfigError: it is neither a name nor an address.
    """
    try:
        return str(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    try:
        name = host.lower().rstrip(".").encode("idna").decode() if not host.isascii() else host.lower().rstrip(".")
    except UnicodeError:
        name = ""
    if not _is_name(name):
        raise ConfigError(f"--host {host!r} is neither the name of a host nor an address")
    return name


def _is_name(name: str) -> bool:
    # Digits alone at the end would be an address, which this is not.
    return bool(_NAME.fullmatch(name)) and len(name) <= _NAME_CHARACTERS_MAX and not name.rpartition(".")[2].isdigit()


def _valid(home: Home, now: datetime) -> Certificate | None:
    """The present certificate, if it can be used."""
    try:
        return check_certificate(own_tls(home), now)[0]
    except ClusterError:
        return None


def _names_before(home: Home) -> list[str]:
    try:
        return list(read_certificate(str(home.endpoint_certificate_file)).names)
    except ClusterError:
        return []
