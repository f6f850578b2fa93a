"""Predicted times: of a step on a link, of workers whose speed varies."""
