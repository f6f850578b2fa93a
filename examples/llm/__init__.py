"""Decoders of the Llama and Gemma families: configuration, network and checkpoint files."""
