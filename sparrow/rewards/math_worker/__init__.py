"""The process that compares mathematical answers, which runs apart from the trainer's.

It is imported from its folder, without the rest of this package, so that a worker pays for
math-verify's imports alone.
"""
