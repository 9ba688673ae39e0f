"""A cluster's certificates: its head signs one for each machine, and Ray's processes authenticate with them (mutual
TLS). `self_signed.py` makes that of the endpoint in the same way.

The authority's key stays in the head's home, and each machine's own key in its own. There is no revocation: the join
server refuses a removed machine, but its certificate stays valid for Ray. To shut it out, remove `tls` and
`run/ray_token` from the head's home, and invite the others again.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from base64 import urlsafe_b64encode
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ..config.nodes import Node
from ..errors import ClusterError
from ..home import Home, write_private

_VALID = timedelta(days=3650)
_CLOCKS = timedelta(days=1)
"""How far another machine's clock may be behind."""

_PEM = re.compile("-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----\n", re.DOTALL)

_USES = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)


def fingerprint(certificate: bytes) -> str:
    """Returns the SHA-256 of a certificate's key, 43 characters: the same for all certificates of that key.

    Args:
        certificate: DER.
    """
    return _fingerprint(x509.load_der_x509_certificate(certificate))


def requested_fingerprint(wanted: str) -> str:
    """Returns the fingerprint of the key in a certificate request (PEM)."""
    return _fingerprint(x509.load_pem_x509_csr(wanted.encode()))


def _fingerprint(of: x509.Certificate | x509.CertificateSigningRequest) -> str:
    raw = of.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return urlsafe_b64encode(hashlib.sha256(raw).digest()).decode().rstrip("=")


def own_fingerprint(home: Home) -> str:
    """Returns the fingerprint of this machine's certificate.

    Raises:
        ClusterError: it has none.
    """
    try:
        certificate = x509.load_pem_x509_certificate(home.certificate_file.read_bytes())
    except (OSError, ValueError) as error:
        raise ClusterError(f"{home.certificate_file} is no certificate: {error}") from None
    return fingerprint(certificate.public_bytes(Encoding.DER))


def request(home: Home) -> str:
    """Returns this machine's certificate request (PEM); makes its key at the first call.

    Raises:
        ClusterError: the key cannot be read or written.
    """
    builder = x509.CertificateSigningRequestBuilder().subject_name(_named("node"))
    key = own_key(home.key_file, lost=home.tls)
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM).decode()


def keep(home: Home, certificate: str, authority: str) -> None:
    """Stores this machine's certificate and the authority that it trusts (PEM)."""
    write_private(home.certificate_file, certificate)
    write_private(home.authority_file, authority)


def trusted_authorities(home: Home) -> str:
    """Returns the certificates (PEM) of this home's authority, and of former heads' authorities."""
    paths = (_authority_file(home), home.former_authorities_file)
    text = "".join(path.read_text(encoding="ascii") for path in paths if path.exists())
    # Machines may have been heads in turn.
    return "".join(dict.fromkeys(_PEM.findall(text)))


def _authority_file(home: Home) -> Path:
    return home.tls / "signing.pem"


class Authority:
    """The certificate authority of one cluster, made at the first call for a home.

    Attributes:
        certificate: its own, PEM.

    Raises:
        ClusterError: its files cannot be read or written.
    """

    def __init__(self, home: Home) -> None:
        self._key = own_key(home.tls / "signing.key", lost=home.tls)
        path = _authority_file(home)
        if not path.exists():
            write_private(path, self._own_certificate())
        self.certificate = path.read_text(encoding="ascii")

    def has_signed(self, certificate: bytes) -> bool:
        """Returns whether this authority signed the certificate.

        Args:
            certificate: DER.
        """
        own = x509.load_pem_x509_certificate(self.certificate.encode())
        try:
            x509.load_der_x509_certificate(certificate).verify_directly_issued_by(own)
        except (InvalidSignature, TypeError, ValueError):
            return False
        return True

    def sign(self, wanted: str, node: Node) -> str:
        """Returns the certificate (PEM) of a node for the key of its request.

        Raises:
            ValueError: the text is no certificate request, or is not signed by its own key.
        """
        try:
            asked = x509.load_pem_x509_csr(wanted.encode())
            key, is_signed = asked.public_key(), asked.is_signature_valid
        except (UnsupportedAlgorithm, x509.InvalidVersion) as error:
            raise ValueError(f"the request for a certificate is of another kind: {error}") from None
        if not is_signed or not isinstance(key, EllipticCurvePublicKey) or key.key_size != 256:
            raise ValueError("the request for a certificate is not signed as it has to be")
        # Ray's processes on one machine call each other by any of these.
        places = alternative_names(["localhost", *sorted({node.address, "127.0.0.1", "::1"})])
        builder = self._builder(node.name, key)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(places, critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage(_USES), critical=False)
        return signed(builder, self._key)

    def _own_certificate(self) -> str:
        builder = self._builder("authority", self._key.public_key())
        return signed(builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True), self._key)

    def _builder(self, name: str, key: EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return begun(name, key, "authority", self._key, (now - _CLOCKS, now + _VALID))


def begun(
    name: str,
    key: EllipticCurvePublicKey,
    issuer: str,
    signing: EllipticCurvePrivateKey,
    valid: tuple[datetime, datetime],
) -> x509.CertificateBuilder:
    """Begins a certificate of `key`: subject, issuer (who signs with `signing`), and validity (from, to)."""
    own = x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(_named(name))
        .issuer_name(_named(issuer))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(valid[0])
        .not_valid_after(valid[1])
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(own, critical=False)
    )


def signed(builder: x509.CertificateBuilder, key: EllipticCurvePrivateKey) -> str:
    """Signs the certificate. Returns it as PEM."""
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM).decode()


def alternative_names(places: Iterable[str]) -> x509.SubjectAlternativeName:
    """Returns the subject alternative names for hosts: names (ASCII) and addresses."""
    return x509.SubjectAlternativeName([_general_name(place) for place in places])


def _general_name(place: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(place))
    except ValueError:
        return x509.DNSName(place)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"satchel {name}")])


def own_key(path: Path, *, lost: Path) -> EllipticCurvePrivateKey:
    """Returns the key in that file; makes it at the first call.

    Args:
        lost: what the error message tells the user to remove if the file holds no key.

    Raises:
        ClusterError: it cannot be read or written.
    """
    try:
        key = load_pem_private_key(path.read_bytes(), None)
        if isinstance(key, EllipticCurvePrivateKey):
            return key
        raise ValueError("it is of another kind")
    except FileNotFoundError:
        key = generate_private_key(SECP256R1())
        text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
        write_private(path, text)
        return key
    except (OSError, ValueError, TypeError) as error:
        raise ClusterError(f"{path} is no key: {error}; remove {lost}") from None
