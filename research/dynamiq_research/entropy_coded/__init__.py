"""Entropy codes of THC's integers, which are about normal."""

from dynamiq_research.entropy_coded.method import EntropyCoded

__all__ = ["EntropyCoded"]
