"""Moshpit All-Reduce: averages in rounds over a grid of peers, and the law of their variance."""

from dynamiq_research.moshpit.law import moshpit_variance
from dynamiq_research.moshpit.mean import moshpit_mean

__all__ = ["moshpit_mean", "moshpit_variance"]
