"""Time, memory and bytes of single parts."""
