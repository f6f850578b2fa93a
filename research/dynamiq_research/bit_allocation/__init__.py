"""Bits of buckets that are in order, from measured gradients."""

from dynamiq_research.bit_allocation.allocation import BitAllocation, GroupBits, allocate_bits

__all__ = ["BitAllocation", "GroupBits", "allocate_bits"]
