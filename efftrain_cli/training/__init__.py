"""The trainer and what stands around it: the loop, the gradient, the state, checkpoints and
sessions."""
