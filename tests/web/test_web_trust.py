"""Files of a client: what cannot be used is named in one sentence, and plain HTTP reads none of them."""

import ssl
from pathlib import Path

import pytest
from web_certificates import Authority

from poolmeter.config import CollectorSection
from poolmeter.errors import BadInput
from poolmeter.web.trust import SYSTEM, Trust, trust_of


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    made = Authority(tmp_path_factory.mktemp("authority"))
    made.issue("client")
    made.issue("other")
    return made


def test_files_that_fit_make_a_context_that_verifies(authority: Authority) -> None:
    context = Trust(authority.certificate, authority.folder / "client.pem", authority.folder / "client.key").context()
    assert context.verify_mode is ssl.CERT_REQUIRED and context.check_hostname
    assert [dict(item[0] for item in found["subject"])["commonName"] for found in context.get_ca_certs()] == ["authority"]


def test_what_cannot_be_used_is_named(authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "nothing.pem").write_text("nothing")
    pairs = [
        (Trust(tmp_path / "absent.pem"), "CA file .*absent.pem cannot be used: No such file"),
        (Trust(tmp_path / "nothing.pem"), "CA file .*nothing.pem cannot be used"),
        (
            Trust(None, authority.folder / "client.pem", authority.folder / "other.key"),
            "client certificate .*client.pem and key .*other.key",
        ),
        (Trust(None, authority.folder / "client.pem"), "client certificate .*client.pem and key .*client.pem cannot be used"),
    ]
    for trust, said in pairs:
        with pytest.raises(BadInput, match=said) as caught:
            trust.opener("https://127.0.0.1:9878")
        assert "\n" not in str(caught.value)
        trust.opener("http://127.0.0.1:9878")


def test_a_flag_goes_before_the_configuration(authority: Authority) -> None:
    section = CollectorSection(api_ca_file=Path("configured.pem"), api_cert_file=Path("cert.pem"))
    assert trust_of(section) == Trust(Path("configured.pem"), Path("cert.pem"))
    assert trust_of(section, "flag.pem") == Trust(Path("flag.pem"), Path("cert.pem"))
    assert trust_of(CollectorSection()) == SYSTEM
