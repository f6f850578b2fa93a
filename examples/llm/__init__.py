"""Parts of the fine-tuning example.

options                            of the command
documents, encoding, packing       text to rows of tokens, with `chat_template`,
                                   `generation_block` and `special_tokens` for chats
config, model                      decoders of the Llama and Gemma 3 families
checkpoint, export                 folders in Hugging Face's layout, with `weight_files`,
                                   `stored_tensors`, `tensor_names` and `json_files`
mesh, averaging, reduction         the mean gradient over devices, compressed
training, batches, evaluation      a step, its rows, the held-out loss
finetuning, snapshots, metrics     a run that can be resumed, and its records
progress, report, errors           what the user sees
corpora, pretraining, demo         a small model and data, made without a download
"""
