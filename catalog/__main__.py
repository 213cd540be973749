"""``catalog`` and ``python -m catalog``: run the command line, print errors as one message."""

from __future__ import annotations

import sys

from catalog.errors import INTERRUPTED, CatalogError


def main() -> None:
    """Run the command line.

    Exits with 0 when the job is done, 1 when it failed, 2 when it was asked for wrongly, 130 after Ctrl-C.
    """
    from catalog.cli import app

    try:
        app()
    except CatalogError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
