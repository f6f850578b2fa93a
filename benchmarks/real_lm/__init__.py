"""A real language model to measure with: SmolLM2-135M, or any folder that the example reads.

texts      rows of conversations and of plain text
gradients  gradients of workers that fine-tune it
errors     errors of an all-reduce of whole gradients, by kind of tensor and by layer
training   losses of its fine-tuning with every method
time_to_accuracy  times of this fine-tuning over slow links, from measured parts

`make demo-llm` makes the folder results/smollm2, which all of them read.
"""
