"""Deliberate faults in the source of the native codec; see `make native-faults`."""
