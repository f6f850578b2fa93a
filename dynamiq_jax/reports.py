"""What functions return to be read: bytes and findings. All of them print as tables."""

from dynamiq_jax._api.wire_report import LeafReport, WireReport
from dynamiq_jax._inspection.inspection import Inspection

__all__ = ["Inspection", "LeafReport", "WireReport"]
