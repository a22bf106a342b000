"""What is done to a graph between trace and plan."""
