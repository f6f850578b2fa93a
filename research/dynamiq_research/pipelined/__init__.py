"""The pipelined train step: a mean in two halves, each under computation."""

from dynamiq_research.pipelined.step import (
    Pipelined,
    PipelinedReport,
    PipelinedState,
    PipelinedUpdate,
)

__all__ = ["Pipelined", "PipelinedReport", "PipelinedState", "PipelinedUpdate"]
