"""``python -m ranvier.cli``."""

from ranvier.cli import main

main()
