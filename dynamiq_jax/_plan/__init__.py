"""Plan of one call: everything about it that is static."""
