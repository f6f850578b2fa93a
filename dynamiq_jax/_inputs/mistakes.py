"""Errors for mistakes of which `inspect` has a name."""


class MistakeError(ValueError):
    """Call that would make compression useless or wrong."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind
