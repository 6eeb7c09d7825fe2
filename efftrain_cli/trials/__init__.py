"""What is to be trained: trials, the runner that trains them, and what a grid of them says."""
