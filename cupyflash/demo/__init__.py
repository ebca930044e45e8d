"""`cupyflash demo`: a language model trained with nothing but attention, its gradients, and NumPy or CuPy.

`model` is the transformer, `training` teaches it and lets it write, `text` finds something to read, `check` judges its
attention against float64, `picture` draws, `screen` shows all of it on a terminal.
"""
