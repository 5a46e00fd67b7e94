"""A local certificate authority for etcd and its clients, which can also issue short-lived certificates.

It replaces files one by one under the same names, as certificate renewal in a cluster does.
"""

from __future__ import annotations

import datetime
import ipaddress
import threading
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

A_DAY_S = 86_400.0


class Authority:
    """A certificate authority with all files in one folder; reissuing a name replaces that name's files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
        self._ends: dict[str, datetime.datetime] = {}
        self._begin()

    @property
    def certificate(self) -> bytes:
        return (self._folder / "ca_cert").read_bytes()

    def replace(self) -> None:
        """Replace the authority by a new one and reissue all names; the old one's certificates become invalid."""
        self._begin()
        for name in self._ends:
            self.issue(name)

    def _begin(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        made = self._sign(self._name, self._key, A_DAY_S, is_authority=True)
        self._write("ca_cert", made.public_bytes(Encoding.PEM))

    def issue(self, name: str, seconds: float = A_DAY_S) -> dict[str, str]:
        """Write a key and a certificate that is valid for `seconds`; return their paths by option name."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        made = self._sign(subject, key, seconds, is_authority=False)
        self._ends[name] = made.not_valid_after_utc
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        texts = {f"{name}.key": private, f"{name}.cert": made.public_bytes(Encoding.PEM)}
        for file, text in texts.items():
            self._write(file, text)
        paths = {"ca_cert": "ca_cert", "cert": f"{name}.cert", "key": f"{name}.key"}
        return {option: str(self._folder / file) for option, file in paths.items()}

    def _write(self, file: str, text: bytes) -> None:
        (self._folder / f"{file}.new").write_bytes(text)
        (self._folder / f"{file}.new").rename(self._folder / file)

    def wait_for_the_end(self, name: str) -> None:
        """Wait until the newest certificate of a name has expired."""
        left = self._ends[name] - datetime.datetime.now(datetime.UTC)
        threading.Event().wait(max(0.0, left.total_seconds()) + 1.0)

    def _sign(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, seconds: float, *, is_authority: bool
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self._name).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(days=1))
        builder = builder.not_valid_after(now + datetime.timedelta(seconds=seconds))
        builder = builder.add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
        return builder.sign(self._key, hashes.SHA256())
