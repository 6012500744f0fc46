"""Models of the suite ``models``, in plain torch, as the packages that people train them with write them.

Nothing in them is shardfuse's.  Weights are random; each takes its batch and gives its loss.
"""
