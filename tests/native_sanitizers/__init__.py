"""Sanitizers of the compiler on the native codec; see `make native-sanitizers`."""
