"""Collectives of which packets are lost, and the drift of the replicas that follows."""

from dynamiq_research.packet_loss.channel import LossyChannel
from dynamiq_research.packet_loss.collectives import LossyCollectives
from dynamiq_research.packet_loss.drift import drift, expected_drift
from dynamiq_research.packet_loss.spans import ByteSpans
from dynamiq_research.packet_loss.terms import Terms, terms_of

__all__ = ["LossyChannel", "LossyCollectives", "drift", "expected_drift"]
# For methods whose messages can lose parts.
__all__ += ["ByteSpans", "Terms", "terms_of"]
