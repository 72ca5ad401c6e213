"""The ``splint`` command's first lines: what is called every few seconds must not wait for the others' imports."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command that the command line names."""
    if sys.argv[1:2] == ["health"]:
        from entrypoint import health

        sys.exit(health.main(sys.argv[2:]))
    from entrypoint import cli

    cli.main()


if __name__ == "__main__":
    main()
