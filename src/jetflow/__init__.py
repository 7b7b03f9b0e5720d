"""jetflow: tree speculative decoding from plain parts."""
