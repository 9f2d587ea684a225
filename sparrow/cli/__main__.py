"""Entry point of ``python -m sparrow.cli``, for launchers such as ``accelerate launch -m``."""

from sparrow.cli import main

main()
