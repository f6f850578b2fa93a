"""A real language model to measure with: SmolLM2-135M, or any folder that the example reads.

folder            its folder, results/smollm2, which `make demo-llm` makes
texts             rows of conversations and of plain text
gradients         gradients of workers that fine-tune it
policies          methods by kind of tensor
errors            errors of an all-reduce of whole gradients, by kind of tensor and by layer
estimates         precision of the errors that metrics report
training          losses of its fine-tuning with every method
losses            means of these losses over seeds
time_to_accuracy  these losses over slow links
"""
