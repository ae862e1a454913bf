"""The ``ranvier`` command. Each subcommand is a module of this package and is imported when it is used."""

from __future__ import annotations


def main() -> None:
    """The entry point of the console script."""
    from ranvier.cli.app import cli

    cli(prog_name="ranvier")


__all__ = ["main"]
