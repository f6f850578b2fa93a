"""Checks between the plan of a call and its run, the agreement of processes included."""
