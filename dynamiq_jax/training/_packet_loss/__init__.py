"""Training over a simulated channel that loses packets.

channel      packets that are lost, and the parts of messages in them
collectives  means of what arrives, and a broadcast of parameters
drift        distance between the parameters of workers
"""
