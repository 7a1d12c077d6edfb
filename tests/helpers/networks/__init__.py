"""Random networks with one loss for each example, and how an engine fares with them.

``batches``: the data. ``operations``: what all operations have in common, and their list, which the other modules
fill. ``network``: networks from a seed. ``trial``: many batches through one engine, held against a loop of autograd.
"""
