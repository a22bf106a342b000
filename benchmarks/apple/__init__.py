"""Fits the model of Apple's GPUs (metalcore/estimates) to public measurements of other projects' kernels."""
