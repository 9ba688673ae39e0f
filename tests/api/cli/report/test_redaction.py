"""What a report must not say."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from satchel.api.cli.report.redaction import Redaction

REDACTED = Redaction(
    "/Users/ann", {"mac0": "node-1", "mac0.local": "node-1", "ann@mac1": "node-2", "mac1": "node-2"}, ["p4ssphrase"]
)


@pytest.mark.parametrize(
    ("text", "then"),
    [
        ("/Users/ann/models/a", "~/models/a"),
        ("/Users/anna/models, /home/bob/x", "/Users/<user>/models, /home/<user>/x"),
        ("mac0 sees mac1 at ann@mac1, and mac0.local", "node-1 sees node-2 at node-2, and node-1"),
        ("a mac0x and a mac0-b stay", "a mac0x and a mac0-b stay"),
        ("192.168.1.10:6379 and 127.0.0.1 and 0.0.0.0", "<address>:6379 and 127.0.0.1 and 0.0.0.0"),
        ("[fe80::1c2d:3e4f%en0]:80 and ::1", "[<address>]:80 and ::1"),
        ("2001:db8::8a2e:370:7334, 12:34:56", "<address>, 12:34:56"),
        ("ether a4:83:e7:01:02:03", "ether <address>"),
        ("Bearer sk-satchel-ab12-Zz_9-x", "Bearer <secret>"),
        ("sk-satchel-ab12-Zz_9-x; hf_abcdEFGH", "sk-<secret>; hf_<secret>"),
        ("https://ann:pw@example.org/x", "https://<secret>@example.org/x"),
        ("it said p4ssphrase", "it said <secret>"),
        ("mlx 0.32.4, macOS 15.1, 1.2.3", "mlx 0.32.4, macOS 15.1, 1.2.3"),
    ],
)
def test_it_is_replaced(text: str, then: str):
    assert REDACTED(text) == then


@given(st.ip_addresses(), st.text(alphabet=" ,;()[]'\"\n", max_size=2))
def test_no_address_of_a_machine_is_left(address: IPv4Address | IPv6Address, around: str):
    if address.is_loopback or address.is_unspecified:
        return
    assert str(address) not in REDACTED(f"at{around} {address}{around} and on")


@given(st.text(alphabet="abcdefghijklmnopqrstuvwxyz0123456789", min_size=8, max_size=40))
def test_no_secret_is_left(secret: str):
    assert secret not in Redaction("/Users/ann", {}, [secret])(f"TOKEN={secret}; x{secret}y")
