"""The certificate that the running endpoint shows: as its files were when they could be used last."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from ..config import Home, Tls
from ..errors import ClusterError
from ..home import write_private
from ..incidents import note_incident
from .endpoint_certificate import check_certificate, read_certificate, server_context

_Version = tuple[tuple[int, int, int] | None, ...]


class ShownCertificate:
    """Read once, and again by `look` where its files have been replaced. Blocks for a moment, on the disk.

    It is written into the home, so that this user's command line can trust it and no other.

    Attributes:
        context: for connections that begin now.
        certificate: that it has.

    Raises:
        ClusterError: it cannot be used.
    """

    def __init__(self, tls: Tls, home: Home) -> None:
        self._tls, self._home = tls, home
        self._version = _version(tls)
        self._failed: _Version | None = None
        self._told: _Version | None = None
        # Dates are not looked at: where the endpoint is started again with one that has expired meanwhile, it goes on.
        self.context = server_context(tls)
        self.certificate = read_certificate(tls.certificate)
        self._publish()

    def look(self) -> None:
        """Take the files if they are others than before, and can be used. If they cannot, and still are the same at the
        next look (one is replaced before the other), that is written down once."""
        version = _version(self._tls)
        if version in (self._version, self._told):
            return
        try:
            found, _ = check_certificate(self._tls, datetime.now(UTC))
            context = server_context(self._tls)
        except ClusterError as error:
            if version == self._failed:
                self._told = version
                note_incident(self._home, "certificate", f"the former one is shown: {error.message}")
            self._failed = version
            return
        self.context, self.certificate = context, found
        self._version, self._failed, self._told = version, None, None
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
