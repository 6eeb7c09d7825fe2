"""Named parameters with gradients in, updated parameters out."""
