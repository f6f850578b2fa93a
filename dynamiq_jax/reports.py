"""What functions return to be read: bytes, bits and findings. All of them print as tables."""

from dynamiq_jax._api.allocate_bits import BitAllocation
from dynamiq_jax._api.wire_report import LeafReport, WireReport
from dynamiq_jax._inspection.inspection import Inspection

__all__ = ["BitAllocation", "Inspection", "LeafReport", "WireReport"]
