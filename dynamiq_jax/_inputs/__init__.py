"""A user's input: options, policies, shards, and errors for what is not possible."""
