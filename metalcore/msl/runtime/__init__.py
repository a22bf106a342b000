"""Programs of compile_shader, and the CPU's compiler: what a kernel is called with, and where it runs."""
