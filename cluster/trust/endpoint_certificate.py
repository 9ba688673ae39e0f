"""Reads and checks the files of the endpoint's certificate and key."""

from __future__ import annotations

import ipaddress
import ssl
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from ..config.config import Tls
from ..errors import ClusterError, NotRunning

DAYS_MIN = 30
"""A certificate that ends sooner is warned of."""

PROTOCOLS = ("http/1.1",)

_RENEW = "renew it (`satchel cert --renew`, if it was made by that)"

_E = TypeVar("_E", bound=x509.ExtensionType)

_OTHERS_KEY = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED")
_WEAK = ("EE_KEY_TOO_SMALL", "CA_KEY_TOO_SMALL", "CA_MD_TOO_WEAK")
_FOR_SERVERS = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE)


@dataclass(frozen=True)
class Certificate:
    """The first certificate in a file: the server's own, without its chain.

    Attributes:
        pem: this certificate alone.
        sha256: its fingerprint, as `openssl x509 -fingerprint -sha256` prints it.
        names: the hosts it is for: names, which may begin with `*.`, and addresses.
        is_self_signed: clients must be given it to trust it.
    """

    path: str
    pem: str
    sha256: str
    names: tuple[str, ...]
    valid_from: datetime
    valid_until: datetime
    is_self_signed: bool

    @property
    def host_names(self) -> tuple[str, ...]:
        """The names among `names` that one host has, without addresses."""
        return tuple(name for name in self.names if name[:1] != "*" and not _is_address(name))

    def reached_at(self, url: str) -> str:
        """Returns `url` with a host name of the certificate, for clients that check it."""
        parts = urlsplit(url)
        if parts.hostname in self.names or not self.host_names:
            return url
        return f"{parts.scheme}://{self.host_names[0]}:{parts.port}"

    def days_left(self, now: datetime) -> int:
        """Returns the whole days until it expires, negative if it has expired."""
        return (self.valid_until - now).days


@dataclass(frozen=True)
class Advice:
    """A problem that prevents nothing, and how to mend it."""

    found: str
    mend: str


class _Encrypted(Exception):
    pass


def read_certificate(path: str) -> Certificate:
    """Reads the first certificate in a PEM file.

    Raises:
        ClusterError: there is none.
    """
    return _understood(path, _certificates(path)[0])


def check_certificate(tls: Tls, now: datetime) -> tuple[Certificate, list[Advice]]:
    """Checks the endpoint's certificate. Returns it, with advice.

    Raises:
        ClusterError: it cannot be used, or not now. The message names the file; after a semicolon it says what to do.
    """
    server_context(tls)
    found = read_certificate(tls.certificate)
    if now > found.valid_until:
        raise ClusterError(f"the certificate {tls.certificate} expired on {_day(found.valid_until)}; {_RENEW}")
    if now < found.valid_from:
        raise ClusterError(
            f"the certificate {tls.certificate} is not valid before {_day(found.valid_from)}; look at this machine's "
            "clock, or use another certificate"
        )
    return found, [*_advice(tls, found, now)]


def server_context(tls: Tls) -> ssl.SSLContext:
    """Returns a server's TLS context (1.2 or newer) with that certificate. Does not check its dates.

    Raises:
        ClusterError: a file cannot be read or used, or they do not belong together.
    """
    certificates = _certificates(tls.certificate)
    uses = _extension(tls.certificate, certificates[0], x509.ExtendedKeyUsage)
    if uses is not None and not any(use in _FOR_SERVERS for use in uses):
        raise ClusterError(f"the certificate {tls.certificate} is not one for servers; use one for TLS servers")
    key = _read(tls.key, "key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(PROTOCOLS)
    try:
        # Without `password` OpenSSL would ask for a passphrase at the terminal.
        context.load_cert_chain(tls.certificate, tls.key, password=_refuse_passphrase)
    except _Encrypted:
        raise ClusterError(
            f"the key {tls.key} is encrypted; write one without a passphrase: `openssl pkey -in {tls.key} -out …`"
        ) from None
    except OSError as error:
        raise ClusterError(_why(tls, certificates, key, error)) from None
    return context


def client_context(certificate: str) -> ssl.SSLContext:
    """Returns a TLS context that trusts only the first certificate in this file, whatever its name and issuer: it is
    this machine's own. The rest of its chain is not trusted, as it may have signed others' certificates.

    Raises:
        NotRunning: it cannot be read.
    """
    try:
        own = read_certificate(certificate).pem
    except ClusterError as error:
        raise NotRunning(f"cannot read the endpoint's certificate: {error.message}") from None
    return context_trusting(own)


def context_trusting(certificate: str) -> ssl.SSLContext:
    """As `client_context`, for a certificate as PEM."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=certificate)
    return context


def _refuse_passphrase() -> str:
    raise _Encrypted


def _why(tls: Tls, certificates: list[x509.Certificate], key: bytes, error: OSError) -> str:
    """Why a certificate and its key file cannot be used together."""
    reason = getattr(error, "reason", None) or ""
    if reason in _WEAK:
        return (
            f"the certificate {tls.certificate} is too weak for TLS ({reason.lower().replace('_', ' ')}); use one with "
            "a key of ECDSA, or of RSA with 2048 bits or more"
        )
    if reason not in _OTHERS_KEY:
        return f"{tls.key} has no private key in PEM form that can be used ({error}); name the file with the key"
    if _is_of_another(key, certificates):
        return (
            f"in {tls.certificate} the certificate of the key {tls.key} is not the first; put it before those that "
            "signed it"
        )
    return (
        f"the key {tls.key} does not belong to the certificate {tls.certificate}; name the two that were made together"
    )


def _is_of_another(key: bytes, certificates: list[x509.Certificate]) -> bool:
    """Whether the key is that of a certificate behind the first one."""
    form = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    try:
        own = load_pem_private_key(key, None).public_key().public_bytes(*form)
        return own in [each.public_key().public_bytes(*form) for each in certificates[1:]]
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return False


def _certificates(path: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(_read(path, "certificate"))
    except (ValueError, x509.InvalidVersion):
        raise ClusterError(f"{path} has no certificate in PEM form; name the file with the certificate") from None


def _read(path: str, what: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        mend = f"name the file under endpoint.tls.{what}, or make one with `satchel cert`"
        raise ClusterError(f"the {what} {path} is not there; {mend}") from None
    except OSError as error:
        mend = "let the user who serves read it"
        raise ClusterError(f"the {what} {path} cannot be read ({error.strerror or error}); {mend}") from None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _understood(path: str, found: x509.Certificate) -> Certificate:
    digest = found.fingerprint(hashes.SHA256()).hex(":").upper()
    names = _extension(path, found, x509.SubjectAlternativeName)
    return Certificate(
        path=path,
        pem=found.public_bytes(Encoding.PEM).decode(),
        sha256=digest,
        names=tuple(
            str(name.value).lower() for name in names or () if isinstance(name, (x509.DNSName, x509.IPAddress))
        ),
        valid_from=found.not_valid_before_utc,
        valid_until=found.not_valid_after_utc,
        is_self_signed=found.subject == found.issuer,
    )


def _extension(path: str, found: x509.Certificate, kind: type[_E]) -> _E | None:
    try:
        return found.extensions.get_extension_for_class(kind).value
    except x509.ExtensionNotFound:
        return None
    except (ValueError, x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as error:
        raise ClusterError(f"the certificate {path} is damaged ({error}); get another one") from None


def _advice(tls: Tls, found: Certificate, now: datetime) -> Iterator[Advice]:
    if (left := found.days_left(now)) < DAYS_MIN:
        days = "1 day" if left == 1 else f"{left} days"
        yield Advice(f"the certificate {tls.certificate} ends in {days}, on {_day(found.valid_until)}", _RENEW)
    if not found.names:
        mend = "clients will refuse it: get one with the names that they use (subject alternative names)"
        yield Advice(f"the certificate {tls.certificate} names no host", mend)
    if stat.S_IMODE(Path(tls.key).stat().st_mode) & 0o077:
        yield Advice(f"others may read the key {tls.key}", f"chmod 600 {tls.key}")


def _day(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
