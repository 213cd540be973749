"""Signatures of the entries of a remote cache (:mod:`catalog.build.remote`): Ed25519, by the package ``cryptography``.

A private key is a PEM file that its owner alone can read. A public key is a line ``ed25519 BASE64 COMMENT``; a file of
signers has one such line per key, and comments after ``#``.
"""

from __future__ import annotations

import base64
import binascii
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from catalog.errors import UsageError
from catalog.extras import how_to_install
from catalog.files import check_file, publish, read_given

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_KIND = "ed25519"
_KEY_BYTES = 32
_PURPOSE = b"kernel-catalog record "
"""Precedes what is signed, so that a signature cannot be used for anything else."""


@contextmanager
def _library() -> Iterator[None]:
    try:
        yield
    except ImportError:
        raise UsageError("signatures need the package cryptography", hint=how_to_install("remote")) from None


class Signer:
    """Signs with the private key in the file ``path``.

    Raises:
        UsageError: the file cannot be read, is no such key, or is open to others; or ``cryptography`` is missing.
    """

    def __init__(self, path: Path) -> None:
        self._key = _private_key(path)
        self.public = base64.b64encode(self._key.public_key().public_bytes_raw()).decode()

    def sign(self, digest: str) -> str:
        """The signature of a digest, in base64."""
        return base64.b64encode(self._key.sign(_PURPOSE + digest.encode())).decode()


def public_line(path: Path) -> str:
    """The public key of a private one, as a line for a file of signers.

    Raises:
        UsageError: as :class:`Signer`.
    """
    return f"{_KIND} {Signer(path).public}"


def _private_key(path: Path) -> Ed25519PrivateKey:
    with _library():
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    try:
        mode, text = path.stat().st_mode, read_given(path)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", hint=f"catalog keys new {path} makes a key.") from None
    if mode & 0o077:
        raise UsageError(
            f"the private key {path} is open to others (mode {stat.S_IMODE(mode):04o})",
            hint=f"Run chmod 600 {path}, if nobody else has read it. Otherwise make another key.",
        )
    try:
        key = load_pem_private_key(text, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"{path} is not a private key of catalog keys", hint="catalog keys new FILE makes one.")
    return key


def new_key(path: Path, comment: str) -> str:
    """Make a key: the private one in the new file ``path``, the public one in ``PATH.pub``; return the public line.

    Raises:
        UsageError: a file exists or cannot be written, the comment has several lines, or ``cryptography`` is missing.
    """
    with _library():
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    public_path = path.with_name(f"{path.name}.pub")
    for file in (path, public_path):
        check_file(file)
        if file.exists():
            raise UsageError(f"{file} exists", hint="Name another file: a key is never overwritten.")
    if comment != " ".join(comment.split()):
        raise UsageError(f"the comment {comment!r} is not a line of words")
    key = Ed25519PrivateKey.generate()
    line = f"{_KIND} {base64.b64encode(key.public_key().public_bytes_raw()).decode()} {comment}".rstrip()
    try:
        publish(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), mode=0o600)
        publish(public_path, f"{line}\n")
    except OSError as error:
        raise UsageError(f"{error.filename or path}: {error.strerror}") from None
    return line


def read_signers(path: Path) -> dict[str, str]:
    """The public keys of a file of signers, in base64, with their comments.

    Raises:
        UsageError: the file cannot be read, or a line is no public key; or ``cryptography`` is missing.
    """
    with _library():
        import cryptography.exceptions  # noqa: F401 - report it before any transfer
    try:
        lines = read_given(path).decode().splitlines()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", hint="catalog keys show KEY prints a line for it.") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not a text of public keys") from None
    signers = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split(maxsplit=2)
        if words:
            signers[_public_key(words, f"{path}, line {number}")] = words[2] if len(words) > 2 else ""
    if not signers:
        raise UsageError(f"{path} has no public key", hint="catalog keys show KEY prints a line for it.")
    return signers


def _public_key(words: list[str], place: str) -> str:
    try:
        sound = len(words) > 1 and words[0] == _KIND and len(base64.b64decode(words[1], validate=True)) == _KEY_BYTES
    except (binascii.Error, ValueError):
        sound = False
    if not sound:
        raise UsageError(f"{place}: not a public key", hint="As in: ed25519 BASE64 COMMENT, one line per key.")
    return words[1]


def is_signed(digest: str, public: str, signature: str) -> bool:
    """Whether ``signature`` of ``digest`` was made with the private key of ``public``; all but the digest in base64."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        key = Ed25519PublicKey.from_public_bytes(base64.b64decode(public, validate=True))
        key.verify(base64.b64decode(signature, validate=True), _PURPOSE + digest.encode())
    except (InvalidSignature, ValueError):
        return False
    return True
