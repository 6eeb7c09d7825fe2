"""Rows of a run in; a run of Weights & Biases, or files of TensorBoard, out."""
