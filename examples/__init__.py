"""Examples, each run from the root of a checkout: `python -m examples.finetune_llm`."""
