from __future__ import annotations

import pytest

from fragments.errors import SettingsError
from services.security import Address, check_bind, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:7700", Address("127.0.0.1", 7700)),
        (" localhost:0 ", Address("localhost", 0)),
        ("[::1]:7700", Address("::1", 7700)),
        ("trainer.example.org:65535", Address("trainer.example.org", 65535)),
    ],
)
def test_an_address_is_read_and_written_alike(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("127.0.0.1", "no port"),
        ("", "no port"),
        ("::1:7700", "brackets"),
        (":7700", "no usable host"),
        ("*:7700", "no usable host"),
        ("a b:7700", "no usable host"),
        ("http://host:80", "brackets"),
        ("host:", "number from 0"),
        ("host:65536", "number from 0"),
        ("host:-1", "number from 0"),
        ("host:\u0661", "number from 0"),
    ],
)
def test_a_malformed_address_is_one_sentence(text: str, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        parse_address(text)


@pytest.mark.parametrize("address", ["127.0.0.1:0", "127.9.9.9:1", "[::1]:0", "localhost:7700"])
def test_loopback_may_be_served(address: str) -> None:
    assert check_bind(address, insecure=False) == parse_address(address)


@pytest.mark.parametrize("address", ["0.0.0.0:7700", "[::]:7700", "10.0.0.1:1", "some-host:7700"])
def test_elsewhere_takes_insecure(address: str) -> None:
    with pytest.raises(SettingsError, match=r"no certificates yet.*--insecure"):
        check_bind(address, insecure=False)
    assert check_bind(address, insecure=True) == parse_address(address)
