"""Programs: PyTorch code traced, fused and planned, as a list of operations for one set of shapes."""
