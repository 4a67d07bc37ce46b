"""Models and the forward pass over a paged cache."""
