"""Parts of examples/finetune_llm.py.

model        a decoder of the Llama family in flax nnx
checkpoint   its configuration and weights in Hugging Face's layout
data         documents and chats, packed into rows of tokens
training     the train step, whose gradients travel compressed
run          the loop: evaluation, records, and checkpoints to resume from
report       a table of the runs
"""

import os

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # It asks for PyTorch otherwise.
