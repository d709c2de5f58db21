"""The parts of a calibration: each times small programs and gives its part of a profile."""
