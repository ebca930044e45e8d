"""`cupyflash demo`: what attention costs here beside what computes the same, and that its gradients are right; with
`--train` a language model, too, of nothing but attention, its gradients, and NumPy or CuPy.

`beside` measures, in the libraries of `places`; `check` judges against float64; `model` is a transformer, `training`
teaches it and lets it write, `text` finds something to read. `picture` draws, and `screen` shows all of it on a
terminal, with `lesson` for the training.
"""
