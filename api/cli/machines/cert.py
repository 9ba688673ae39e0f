"""`satchel cert`: a certificate for the endpoint. It works on the home, whether a server runs or not."""

from __future__ import annotations

import json as json_text
import shlex
from typing import Annotated, Optional

import typer

from ..options import HomeOption, JsonOption, chosen_home

DaysOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(
        "--days",
        min=1,
        max=3650,
        metavar="N",
        help="Days for which it is valid (else 825, the most that Apple's clients accept).",
    ),
]
HostOption = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        "--host", metavar="NAME", help="A name or address by which clients reach this machine; may be repeated."
    ),
]
RenewOption = Annotated[
    bool, typer.Option("--renew", help="Replace a certificate that is still valid; with the same key and hosts.")
]


def cert(
    host: HostOption = None,
    days: DaysOption = None,
    renew: RenewOption = False,
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Make a self-signed certificate for the endpoint, and its key."""
    from ....cluster.trust.self_signed import DAYS, make_certificate, own_tls

    where = chosen_home(home)
    made = make_certificate(where, host or (), days=days or DAYS, renew=renew)
    tls = own_tls(where)
    if json:
        print(
            json_text.dumps(
                {
                    "certificate": tls.certificate,
                    "key": tls.key,
                    "sha256": made.sha256,
                    "names": made.names,
                    "valid_from": made.valid_from.isoformat(),
                    "valid_until": made.valid_until.isoformat(),
                },
                indent=2,
            )
        )
        return
    own = shlex.quote(tls.certificate)
    for line in (
        f"SHA-256 fingerprint: {made.sha256}",
        f"Certificate: {tls.certificate}",
        f"  until {made.valid_until:%Y-%m-%d}, for {', '.join(made.names)}",
        f"Key: {tls.key}",
        "In the config (a server that has it there takes another one within seconds):",
        "  endpoint:",
        f"    tls: {{certificate: {_yaml(tls.certificate)}, key: {_yaml(tls.key)}}}",
        "Clients need a copy of the certificate, and never the key:",
        f"  curl --cacert {own} https://{made.names[0]}:8000/v1/models",
        f"  SSL_CERT_FILE={own} python …    # for the openai client",
    ):
        print(line)


def _yaml(path: str) -> str:
    """Returns the path quoted, if necessary, for a YAML flow mapping."""
    return (
        path
        if all(letter.isalnum() or letter in "/._-" for letter in path)
        else json_text.dumps(path, ensure_ascii=False)
    )
