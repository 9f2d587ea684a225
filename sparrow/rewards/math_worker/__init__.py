"""The worker process that compares mathematical answers, separate from the trainer's process.

This package is imported from its own folder, without the rest of Sparrow, so a worker only has to
import math-verify.
"""
