"""Which tiles a problem runs with."""
