"""Compare mathematical answers in a worker process, outside the trainer's process.

A worker imports this package from its own folder, without the rest of Sparrow. It therefore only
has to import math-verify.
"""
