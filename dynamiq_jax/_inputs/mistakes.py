"""Errors that `inspect` reports under the same name."""


class MistakeError(ValueError):
    """Call that would make compression useless or wrong."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind
