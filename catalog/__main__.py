"""``catalog`` and ``python -m catalog``: run the command line, print errors as one message."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from catalog.errors import INTERRUPTED, CatalogError


def main() -> None:
    """Run the command line.

    Exits with 0 on success, 1 on failure, 2 on a usage error, 130 after Ctrl-C.
    """
    from catalog.cli.main import app

    try:
        with _warnings():
            app()
    except CatalogError as error:
        print(error.printed, file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


@contextmanager
def _warnings() -> Iterator[None]:
    """Print the library's warnings to stderr, each marked as a warning."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("Warning: %(message)s"))
    logger = logging.getLogger("catalog")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


if __name__ == "__main__":
    main()
