"""What methods and topologies have in common.

axis        workers of one axis, and the collectives between them
codec       interface between a method, which codes chunks, and a topology, which carries them
naming      objects from names such as "dynamiq:5"
validation  errors for fields that are not possible
"""
