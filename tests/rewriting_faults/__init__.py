"""Deliberate faults in the rewriting of `dq.compress`; see `make rewriting-faults`."""
