"""Compilation of training steps of large models, which are never allocated.

__main__   cases, processes and the table
decoder    a decoder with the shapes of Llama 3 8B, and its training step on a mesh
dense      dense layers on several meshes, and buckets that are alike
"""
