"""Measurements: what a machine's links do, and what a streamed model takes against the limits."""
