"""The CPU: the specification, and the backend that is always there."""
