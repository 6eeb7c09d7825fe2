"""What is to be trained: trials, what they cost, and the runner that trains them."""
