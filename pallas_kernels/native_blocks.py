"""Formats with one width in the native codec for CPUs."""

from pallas_kernels._native.blocks import FORMATS, NativeBlocks

__all__ = ["FORMATS", "NativeBlocks"]
