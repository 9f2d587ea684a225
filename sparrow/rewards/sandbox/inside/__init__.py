"""The part of the sandbox that runs inside it. It imports only the standard library, and as little
of that as possible.
"""
