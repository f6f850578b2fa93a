"""Formats with one width in the native codec for CPUs."""

from pallas_kernels._native.blocks import DTYPES, FORMATS, NativeBlocks

__all__ = ["DTYPES", "FORMATS", "NativeBlocks"]
