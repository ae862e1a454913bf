"""``python -m ranvier``: the ``ranvier`` command, also from a source tree that nobody installed."""

from ranvier.cli import main

main()
