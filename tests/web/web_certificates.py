"""Certificates for tests, by openssl's command line."""

import shutil
import subprocess
from pathlib import Path

import pytest

OPENSSL = shutil.which("openssl")


def run(*words: str) -> None:
    """openssl, which must succeed."""
    if OPENSSL is None:
        pytest.skip("openssl is not installed (Debian: openssl)")
    subprocess.run([OPENSSL, *words], check=True, capture_output=True)


class Authority:
    """A certificate authority in a folder."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.key, self.certificate = folder / f"{name}.key", folder / f"{name}.pem"
        run("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(self.key))
        words = ["req", "-x509", "-new", "-key", str(self.key), "-subj", f"/CN={name}", "-days", "2", "-out", str(self.certificate)]
        run(*words, "-addext", "basicConstraints=critical,CA:TRUE")

    def issue(self, name: str, sans: str = "DNS:localhost,IP:127.0.0.1") -> tuple[Path, Path]:
        """Certificate and key for a name."""
        key, request, made = (self.folder / f"{name}.{end}" for end in ("key", "csr", "pem"))
        extensions = self.folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={sans}\n")
        run("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(key))
        run("req", "-new", "-key", str(key), "-subj", f"/CN={name}", "-out", str(request))
        signed = ["x509", "-req", "-in", str(request), "-CA", str(self.certificate), "-CAkey", str(self.key), "-CAcreateserial"]
        run(*signed, "-days", "2", "-extfile", str(extensions), "-out", str(made))
        return made, key
