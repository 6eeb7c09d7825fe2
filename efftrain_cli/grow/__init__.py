"""A run and operators in, a larger run out; or two runs in, and the step to grow at out."""
