"""``python -m sparrow.cli``, which launchers such as ``accelerate launch -m`` start."""

from sparrow.cli import main

main()
