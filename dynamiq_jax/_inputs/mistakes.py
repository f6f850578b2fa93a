"""Errors that `inspect` reports under the same name."""


class MistakeError(ValueError):
    """Error of a call in which compression would be useless or wrong."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind
