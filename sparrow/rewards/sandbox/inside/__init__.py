"""The part of the sandbox that runs inside it: the standard library alone, and as little of that as will do."""
