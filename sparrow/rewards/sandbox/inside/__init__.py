"""The part of this package that runs inside the sandbox. It imports only the standard library, and
as little of it as possible.
"""
