"""A certificate authority that lives as long as a run and opens TLS of allowed hosts; its keys never leave this process."""

from __future__ import annotations

import datetime
import os
import ssl
from collections import OrderedDict
from typing import Any

MAX_CONTEXTS = 256
LIFE = datetime.timedelta(days=397)
"""The longest that clients accept of a leaf."""


def _cryptography() -> Any:
    try:
        import cryptography.x509
        import cryptography.x509.oid
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as e:
        why = "Egress.intercept needs the cryptography package; run `pip install 'rollmill[egress]'` or set intercept=False"
        raise ValueError(why) from e
    return cryptography.x509, hashes, serialization, ec


def _extensions(builder: Any, x509: Any, own: Any, issuer: Any, *, is_authority: bool) -> Any:
    rights = "digital_signature content_commitment key_encipherment data_encipherment key_agreement key_cert_sign crl_sign"
    usage = dict.fromkeys([*rights.split(), "encipher_only", "decipher_only"], False)
    usage |= {"key_cert_sign": True, "crl_sign": True} if is_authority else {"digital_signature": True}
    return (
        builder.add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
        .add_extension(x509.KeyUsage(**usage), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(own), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer), critical=False)
    )


class Authority:
    """One per run: forks of a box trust the certificate that their parent was given."""

    def __init__(self, name: str = "Internal Root CA") -> None:
        self._x509, self._hashes, self._serialization, ec = _cryptography()
        x509 = self._x509
        self._key, self._leaf_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
        self._subject = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, name)])
        public = self._key.public_key()
        certificate = _extensions(self._builder(self._subject, public), x509, public, public, is_authority=True).sign(
            self._key, self._hashes.SHA256()
        )
        self.pem: bytes = certificate.public_bytes(self._serialization.Encoding.PEM)
        """What a box must trust."""
        self._contexts: OrderedDict[str, ssl.SSLContext] = OrderedDict()

    def _builder(self, subject: Any, public: Any) -> Any:
        # A day back: a box's clock may be a little behind.
        start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
        builder = self._x509.CertificateBuilder().subject_name(subject).issuer_name(self._subject).public_key(public)
        return builder.serial_number(self._x509.random_serial_number()).not_valid_before(start).not_valid_after(start + LIFE)

    def leaf_pem(self, host: str) -> bytes:
        """Key and certificate for one host."""
        x509, public = self._x509, self._leaf_key.public_key()
        builder = _extensions(self._builder(x509.Name([]), public), x509, public, self._key.public_key(), is_authority=False)
        # Without a subject the names must be critical; the common name could not hold a long one.
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        s = self._serialization
        key: bytes = self._leaf_key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
        certificate: bytes = builder.sign(self._key, self._hashes.SHA256()).public_bytes(s.Encoding.PEM)
        return key + certificate

    def context(self, host: str) -> ssl.SSLContext:
        """A server context that speaks for `host`, HTTP/1.1 only."""
        if (known := self._contexts.get(host)) is not None:
            self._contexts.move_to_end(host)
            return known
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols(["http/1.1"])
        # The ssl module loads keys from paths only; an anonymous file keeps this one off every disk.
        fd = os.memfd_create("leaf", os.MFD_CLOEXEC)
        try:
            os.write(fd, self.leaf_pem(host))
            context.load_cert_chain(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)
        self._contexts[host] = context
        if len(self._contexts) > MAX_CONTEXTS:
            self._contexts.popitem(last=False)
        return context
