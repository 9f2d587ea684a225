"""The part of the sandbox that runs inside it: it imports only the standard library, and no more of
it than needed.
"""
