"""Fair comparisons of decoders."""
