"""The loss of one worker: its part of the batch, its modules, its constants."""
