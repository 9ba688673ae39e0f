"""The certificate that the running endpoint shows: the last usable state of its files."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from ..config.config import Tls
from ..errors import ClusterError
from ..home import Home, write_private
from ..incidents import note_incident
from .endpoint_certificate import check_certificate, read_certificate, server_context

_Version = tuple[tuple[int, int, int] | None, ...]


class ShownCertificate:
    """The endpoint's certificate, read once, and again by `look` if its files were replaced. Blocks on the disk.

    A copy is written into the home, so that this user's command line can trust it and no other.

    Attributes:
        context: the TLS context for new connections.
        certificate: the certificate in it.

    Raises:
        ClusterError: the certificate cannot be used.
    """

    def __init__(self, tls: Tls, home: Home) -> None:
        self._tls, self._home = tls, home
        self._version = _version(tls)
        self._failed: _Version | None = None
        self._reported: _Version | None = None
        # Dates are not checked: an endpoint that restarts with an expired certificate goes on.
        self.context = server_context(tls)
        self.certificate = read_certificate(tls.certificate)
        self._publish()

    def look(self) -> None:
        """Takes changed files if they can be used. If they cannot, and are the same at the next look, it notes one
        incident. The two files are replaced one after the other, so for a moment they may not fit."""
        version = _version(self._tls)
        if version in (self._version, self._reported):
            return
        try:
            found, _ = check_certificate(self._tls, datetime.now(UTC))
            context = server_context(self._tls)
        except ClusterError as error:
            if version == self._failed:
                self._reported = version
                note_incident(self._home, "certificate", f"the former one is shown: {error.message}")
            self._failed = version
            return
        self.context, self.certificate = context, found
        self._version, self._failed, self._reported = version, None, None
        self._publish()

    def _publish(self) -> None:
        try:
            write_private(self._home.shown_certificate_file, self.certificate.pem)
        except ClusterError as error:
            note_incident(self._home, "certificate", f"this user's command line may not trust it: {error.message}")


def _version(tls: Tls) -> _Version:
    return tuple(_state(Path(path)) for path in (tls.certificate, tls.key))


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
