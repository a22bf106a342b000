"""The operators that ran."""

import torch


def operators(function):
    """The metalcore operators that a call runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    prefix = "metalcore::"
    return {event.key.removeprefix(prefix) for event in profile.key_averages() if event.key.startswith(prefix)}
