"""Parts of examples/finetune_llm.py.

train_step   a train step of optax on global arrays, without this library
routes       the line that compresses it
with_states  the route for methods that carry states
options      options of the command
recipe       hyperparameters, and the optimizer
model        a decoder of the Llama family in flax nnx
loss         its loss, of a train step and of all rows that are held out
checkpoint   its configuration and weights in Hugging Face's layout
data         documents and chats, packed into rows of tokens
sharding     the split of arrays over the devices of a worker
run          the loop: evaluation, records, and checkpoints to resume from
progress     the progress of a run on the console
prediction   predicted times of a step on slower links
report       a table of the runs
plot         a plot of their losses
"""

import os

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # It asks for PyTorch otherwise.
