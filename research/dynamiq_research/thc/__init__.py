"""THC: integers on one grid, which are added without decoding."""

from dynamiq_research.thc.method import THC

__all__ = ["THC"]
