"""Certificates as authorities sign them, good ones and others, for tests of the endpoint's TLS."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

from satchel.cluster.config.config import Tls

SERVER = (ExtendedKeyUsageOID.SERVER_AUTH,)
CLIENT = (ExtendedKeyUsageOID.CLIENT_AUTH,)


def new_key(kind: str = "ecdsa") -> Any:
    if kind == "rsa":
        return rsa.generate_private_key(65537, 2048)
    if kind == "small":
        return rsa.generate_private_key(65537, 1024)
    return ed25519.Ed25519PrivateKey.generate() if kind == "ed25519" else ec.generate_private_key(ec.SECP256R1())


def key_pem(key: Any, *, passphrase: bytes | None = None, traditional: bool = False) -> str:
    form = PrivateFormat.TraditionalOpenSSL if traditional else PrivateFormat.PKCS8
    sealed = NoEncryption() if passphrase is None else BestAvailableEncryption(passphrase)
    return key.private_bytes(Encoding.PEM, form, sealed).decode()


@dataclass
class Issued:
    """A certificate, and those that signed it up to the authority that clients know."""

    certificate: x509.Certificate
    key: Any
    above: tuple[x509.Certificate, ...] = ()

    @property
    def pem(self) -> str:
        return pem(self.certificate)

    @property
    def chain(self) -> str:
        """As a server sends it: the authority that clients know is not in it."""
        return self.pem + "".join(pem(each) for each in self.above[:-1])

    def issue(
        self,
        names: Sequence[str],
        *,
        key: Any = None,
        days: tuple[float, float] = (-1, 60),
        uses: Sequence[ObjectIdentifier] = SERVER,
    ) -> Issued:
        """A server's certificate, valid from and until so many days from now."""
        own = key or new_key()
        extensions = [x509.BasicConstraints(ca=False, path_length=None), x509.ExtendedKeyUsage(uses)]
        if names:
            extensions.append(x509.SubjectAlternativeName([_name(name) for name in names]))
        return self._sign("server", own, extensions, days)

    def intermediate(self) -> Issued:
        return self._sign("intermediate", new_key(), [x509.BasicConstraints(ca=True, path_length=0)], (-1, 60))

    def _sign(self, name: str, key: Any, extensions: Sequence[Any], days: tuple[float, float]) -> Issued:
        certificate = _signed(name, key, self.certificate.subject, self.key, extensions, days)
        return Issued(certificate, key, (self.certificate, *self.above))

    def write(self, folder: Path, *, name: str = "server", whole: bool = True) -> Tls:
        """Into files as the config names them."""
        return write_pair(folder, self.chain if whole else self.pem, key_pem(self.key), name=name)


def authority() -> Issued:
    key = new_key()
    constraints = x509.BasicConstraints(ca=True, path_length=None)
    return Issued(_signed("authority", key, _subject("authority"), key, [constraints], (-1, 60)), key)


def pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(Encoding.PEM).decode()


def write_pair(folder: Path, certificate: str, key: str, *, name: str = "server") -> Tls:
    """Each replaced in one step, as programs do that renew certificates."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / f"{name}.pem", folder / f"{name}.key"
    for path, text in zip(paths, (certificate, key), strict=True):
        new = path.with_suffix(path.suffix + ".new")
        new.write_text(text)
        new.chmod(0o600)
        new.replace(path)
    return Tls(certificate=str(paths[0]), key=str(paths[1]))


def _signed(
    name: str, key: Any, issuer: x509.Name, signing: Any, extensions: Sequence[Any], days: tuple[float, float]
) -> x509.Certificate:
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(_subject(name))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + timedelta(days=days[0]))
        .not_valid_after(now + timedelta(days=days[1]))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), critical=False)
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
    return builder.sign(signing, None if isinstance(signing, ed25519.Ed25519PrivateKey) else hashes.SHA256())


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"test {name}")])


def _name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
