"""Parts that the scripts of language models share, and makers of models and data.

budget           memory, disk and time, known before a run
digests          digests of what a run depends on
document_files   files of documents to train on
docstring_chats  conversations from the standard library
small_decoder    a model and data that need no download
"""
