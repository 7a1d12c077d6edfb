"""The mechanism of a step: settings, sensitivity, clipping, layer scales, noise, and the sum that they make.

Nothing here knows of ledgers, ε or other workers; of samplers, ``grouping`` alone asks what they drew.
"""
