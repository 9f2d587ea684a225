"""Entry point of ``python -m sparrow``."""

from sparrow.cli import main

main()
